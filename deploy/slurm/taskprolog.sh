#!/bin/bash
# TaskProlog= in slurm.conf: as the user, before each task. What it prints as "export NAME=value" is set in the
# task's environment, and what it prints as "print TEXT" comes with the task's output.
GPUMUX_PARTITIONS="" GPUMUX_MARKS=/run/gpumux-slurm
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ " $GPUMUX_PARTITIONS " == *" ${SLURM_JOB_PARTITION:-} "* ]] || exit 0
token=$GPUMUX_MARKS/tokens/${SLURM_JOB_ID:-}
if [[ -f $token && -r $token ]]; then
  { read -r grant && read -r endpoint && read -r note; } <"$token"
  echo "export GPUMUX_ENDPOINT=$endpoint"
  echo "export GPUMUX_GRANT=$grant"
  if [[ -n $note ]]; then
    echo "print $note"
  fi
elif [[ -n ${SLURM_JOB_GPUS:-} ]]; then
  echo "export GPUMUX_ENDPOINT=ipc:///run/gpumux/${SLURM_JOB_GPUS%%,*}/gpumux.sock"
else
  exit 0
fi
# The daemon owns the GPU; what the job computes beside it belongs on the CPU.
echo "export CUDA_VISIBLE_DEVICES="
