#!/bin/bash
# Prolog= in slurm.conf: as root, on each node, before a job's first step. Starts a daemon for every GPU the job
# may use, and makes the grant of a job that asks for shares (--gres=gpumux_share:N). What exits with an error here makes
# Slurm drain the node and requeue the job.
set -euo pipefail
PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
GPUMUX_PARTITIONS="" GPUMUX_MARKS=/run/gpumux-slurm GPUMUX_SHARES=/run/gpumux-shares GPUMUX_USER=gpumux
GPUMUX_SHARES_OF_A_GPU=100 GPUMUX_MAX_PRIORITY=low GPUMUX_COMMAND=/opt/gpumux/bin/gpumux GPUMUX_SCONTROL=scontrol
conf=${GPUMUX_SLURM_CONF:-/etc/gpumux/slurm.conf}
[[ -r $conf ]] && source "$conf"

[[ " $GPUMUX_PARTITIONS " == *" ${SLURM_JOB_PARTITION:?} "* ]] || exit 0

fail() {
  rm -f "$GPUMUX_MARKS"/gpu*/"$SLURM_JOB_ID" "$GPUMUX_MARKS"/grants/*/"slurm-$SLURM_JOB_ID.json" \
    "$GPUMUX_MARKS/tokens/$SLURM_JOB_ID"
  echo "gpumux prolog: $1" >&2
  exit 1
}

# Slurm's environment says which GPUs a job has (gres/gpu, gres/shard), and nothing of other resources: those are asked for.
shares="" gpus=() note=""
if [[ -n ${SLURM_JOB_GPUS:-} ]]; then
  IFS=, read -ra gpus <<<"$SLURM_JOB_GPUS"
else
  if ! job=$("$GPUMUX_SCONTROL" --oneliner --details show job "${SLURM_JOB_ID:?}"); then
    fail "scontrol does not show job $SLURM_JOB_ID"
  fi
  # What the job has on this node: a GRES= for each group of nodes with equal parts. JOB_GRES= is the sum over all nodes.
  held="" rest=$job
  while [[ $rest =~ [[:space:]]Nodes=([^[:space:]]+)[[:space:]]+CPU_IDs=[^[:space:]]*[[:space:]]+Mem=[^[:space:]]*[[:space:]]+GRES=([^[:space:]]*)(.*)$ ]]; do
    nodes=${BASH_REMATCH[1]} parts=${BASH_REMATCH[2]} rest=${BASH_REMATCH[3]}
    if "$GPUMUX_SCONTROL" show hostnames "$nodes" | grep -xF "${SLURMD_NODENAME:-$(hostname -s)}" >/dev/null; then
      held=$parts
    fi
  done
  # Releases that don't show it say what the job asked for on each node.
  if [[ -z $held && $job =~ [[:space:]]TresPerNode=([^[:space:]]+) ]]; then
    held=${BASH_REMATCH[1]}
  fi
  # Slurm splits a request without a type over the GPUs of a node. A job has one daemon, so the largest part counts.
  IFS=, read -ra parts <<<"$held"
  for part in "${parts[@]}"; do
    if [[ $part =~ ^(gres[:/])?gpumux_share(:gpu([0-9]+))?([:=]([0-9]+))?(\(CNT:([0-9]+)\))?$ ]]; then
      gpu=${BASH_REMATCH[3]:-0} count=${BASH_REMATCH[7]:-${BASH_REMATCH[5]:-1}}
      if [[ -n $shares ]]; then
        note="gpumux: Slurm gave this job shares of several GPUs ($held), of which the most of one are used; ask for one GPU's, such as --gres=gpumux_share:gpu0:25"
      fi
      if [[ -z $shares ]] || ((count > shares)); then
        gpus=("$gpu") shares=$count
      fi
    elif [[ $part == *gpumux_share* ]]; then
      fail "scontrol says $part of job $SLURM_JOB_ID, which is no number of shares"
    fi
  done
fi
[[ ${#gpus[@]} -gt 0 ]] || exit 0

install -d -m 755 "$GPUMUX_MARKS" "$GPUMUX_MARKS/grants"
exec 9>"$GPUMUX_MARKS/lock"
flock 9 # prologs and epilogs of other jobs run at the same time
for gpu in "${gpus[@]}"; do
  if [[ ! $gpu =~ ^[0-9]+$ ]]; then
    fail "SLURM_JOB_GPUS=$SLURM_JOB_GPUS is no list of GPU indices"
  fi
  mkdir -p "$GPUMUX_MARKS/gpu$gpu"
  : >"$GPUMUX_MARKS/gpu$gpu/${SLURM_JOB_ID:?}"
  install -d -o "$GPUMUX_USER" -m 755 "$GPUMUX_SHARES" "$GPUMUX_SHARES/$gpu"
  # Returns when clients are served (Type=notify); a daemon that runs is left alone. It must not inherit the lock.
  if ! systemctl start "gpumux@$gpu" 9>&-; then
    fail "gpumux@$gpu does not start; see journalctl -u gpumux@$gpu"
  fi
done
if [[ -n $shares ]]; then
  # The token is for the job's user alone, who reads it in taskprolog.sh.
  grants=$GPUMUX_MARKS/grants/${gpus[0]} token=$GPUMUX_MARKS/tokens/$SLURM_JOB_ID
  install -d -m 755 "$grants" # the daemon reads it
  install -d -m 711 "$GPUMUX_MARKS/tokens"
  install -m 600 /dev/null "$token"
  if ! "$GPUMUX_COMMAND" grants make --dir "$grants" --of "$GPUMUX_SHARES_OF_A_GPU" \
    --max-priority "$GPUMUX_MAX_PRIORITY" "slurm-$SLURM_JOB_ID" "$shares" >"$token" 9>&-; then
    fail "the share can't be granted"
  fi
  printf '%s\n' "ipc://$GPUMUX_SHARES/${gpus[0]}/gpumux.sock" "$note" >>"$token"
  chown "${SLURM_JOB_UID:?}" "$token"
fi
