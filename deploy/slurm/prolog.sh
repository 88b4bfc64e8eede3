#!/bin/bash
# Prolog= in slurm.conf: as root, on each node, before a job's first step. Starts a daemon for every GPU the job
# may use. What exits with an error here makes Slurm drain the node and requeue the job.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
GPUMUX_PARTITIONS="" GPUMUX_MARKS=/run/gpumux-slurm
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ " $GPUMUX_PARTITIONS " == *" ${SLURM_JOB_PARTITION:?} "* ]] || exit 0
[[ -n ${SLURM_JOB_GPUS:-} ]] || exit 0

mkdir -p "$GPUMUX_MARKS"
exec 9>"$GPUMUX_MARKS/lock"
flock 9 # prologs and epilogs of other jobs run at the same time
IFS=, read -ra gpus <<<"$SLURM_JOB_GPUS"
for gpu in "${gpus[@]}"; do
  if [[ ! $gpu =~ ^[0-9]+$ ]]; then
    echo "gpumux prolog: SLURM_JOB_GPUS=$SLURM_JOB_GPUS is no list of GPU indices" >&2
    exit 1
  fi
  mkdir -p "$GPUMUX_MARKS/gpu$gpu"
  : >"$GPUMUX_MARKS/gpu$gpu/${SLURM_JOB_ID:?}"
  # Returns when clients are served (Type=notify); a daemon that runs is left alone. It must not inherit the lock.
  if ! systemctl start "gpumux@$gpu" 9>&-; then
    rm -f "$GPUMUX_MARKS"/gpu*/"$SLURM_JOB_ID"
    echo "gpumux prolog: gpumux@$gpu does not start; see journalctl -u gpumux@$gpu" >&2
    exit 1
  fi
done
