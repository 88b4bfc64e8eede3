#!/bin/bash
# TaskProlog= in slurm.conf: as the user, before each task. What it prints as "export NAME=value" is set in the task's environment.
GPUMUX_PARTITIONS=""
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ " $GPUMUX_PARTITIONS " == *" ${SLURM_JOB_PARTITION:-} "* && -n ${SLURM_JOB_GPUS:-} ]] || exit 0
echo "export GPUMUX_ENDPOINT=ipc:///run/gpumux/${SLURM_JOB_GPUS%%,*}/gpumux.sock"
# The daemon owns the GPU; what the job computes beside it belongs on the CPU.
echo "export CUDA_VISIBLE_DEVICES="
