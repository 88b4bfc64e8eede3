#!/bin/bash
# Epilog= in slurm.conf: as root, on each node, after a job. Releases the job's grant, which ends what is left of it in
# the daemon, and stops the daemons that no other job uses.
set -euo pipefail
PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
GPUMUX_MARKS=/run/gpumux-slurm
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ -d $GPUMUX_MARKS ]] || exit 0
exec 9>"$GPUMUX_MARKS/lock"
flock 9
status=0
# A grant is its file (gpumux grants release does the same): nothing here may fail for want of a package.
rm -f "$GPUMUX_MARKS"/grants/*/"slurm-${SLURM_JOB_ID:?}.json" "$GPUMUX_MARKS/tokens/$SLURM_JOB_ID"
for place in "$GPUMUX_MARKS"/gpu*/; do
  mark=$place$SLURM_JOB_ID
  [[ -e $mark ]] || continue
  rm "$mark"
  gpu=$(basename "$place")
  # rmdir fails while another job's mark is there.
  if rmdir "$place" 2>/dev/null; then
    systemctl stop "gpumux@${gpu#gpu}" 9>&- || status=1
  fi
done
exit "$status"
