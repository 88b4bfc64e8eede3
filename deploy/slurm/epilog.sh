#!/bin/bash
# Epilog= in slurm.conf: as root, on each node, after a job. Stops the daemons that no other job uses. The job's
# processes are gone by now, and the daemon has dropped what they left.
set -euo pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
GPUMUX_MARKS=/run/gpumux-slurm
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ -d $GPUMUX_MARKS ]] || exit 0
exec 9>"$GPUMUX_MARKS/lock"
flock 9
status=0
for place in "$GPUMUX_MARKS"/gpu*/; do
  mark=$place${SLURM_JOB_ID:?}
  [[ -e $mark ]] || continue
  rm "$mark"
  gpu=$(basename "$place")
  # rmdir fails while another job's mark is there.
  if rmdir "$place" 2>/dev/null; then
    systemctl stop "gpumux@${gpu#gpu}" 9>&- || status=1
  fi
done
exit "$status"
