#!/bin/sh
# The first half hour of the CUDA device on a card, in three commands of less than ten minutes each, the shortest answers first:
#
#   sh tools/first_contact.sh 1    does it run: what is there, what is taken for granted, the driver, what decides the design, a first figure
#   sh tools/first_contact.sh 2    the contract, models beside their reference runs, operators, shares, what is left of the design
#   sh tools/first_contact.sh 3    figures: what gpumux costs a job alone, and jobs together beside plain streams, time slicing and MPS
#
# It needs no network. It runs on the Python that is there (PYTHON, default python3); what that lacks is installed from wheels in
# WHEELS (a folder; default .whl), into a folder of its own. Every step has its time, and one that fails or hangs stops no other. After each
# step all logs and results are packed anew: OUT/first-contact-N.tgz, with OUT/first-contact-N.txt, a line a step, beside it. Run
# again where WORK (default build/first-contact-work) is still there, the suite goes on where it was. No setting of the card is changed.
#
# DRY=1 lists what the longer steps would run instead of running it: with a stand-in for the driver, that is how this file is tested.
set -u
part=${1:-}
case $part in
1 | 2 | 3) ;;
*)
  sed -n '2,16s/^# \{0,1\}//p' "$0" >&2
  exit 64
  ;;
esac
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
OUT=${OUT:-build/first-contact}
LIMIT_S=${LIMIT_S:-565}
LEAST_S=${LEAST_S:-15}
DRY=${DRY:-}
began=$(date +%s)
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd) || exit 1
WORK=${WORK:-build/first-contact-work}
mkdir -p "$WORK" || exit 1
WORK=$(cd "$WORK" && pwd) || exit 1
work=$WORK/part-$part
mkdir -p "$work" || exit 1
summary=$OUT/first-contact-$part.txt
: >"$summary"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
failed=0
name=
child=

left() {
  echo $((LIMIT_S - $(date +%s) + began))
}

pack() {
  tar czf "$WORK/packing" -C "$WORK" "part-$part" -C "$OUT" "first-contact-$part.txt" && mv "$WORK/packing" "$OUT/first-contact-$part.tgz" && return
  echo "the results can't be packed; is there room in $WORK and $OUT?" >&2
  failed=1
}

# Ended from outside: end the step that runs, which is in a process group of its own, and pack what there is.
interrupted() {
  trap '' INT TERM HUP
  [ -z "$child" ] || { kill -INT "$child" && wait "$child"; }
  echo "$name: interrupted" | tee -a "$summary"
  pack
  exit 130
}
trap interrupted INT TERM HUP

# step NAME SECONDS COMMAND...: run it for at most so long, and no longer than what is left; keep its whole output, show its end.
step() {
  name=$1
  most=$2
  shift 2
  room=$(left)
  if [ "$room" -lt "$LEAST_S" ]; then
    echo "$name: not run, the time was up" | tee -a "$summary"
    return
  fi
  [ "$most" -le "$room" ] || most=$room
  echo "== $name: $* (at most $most s)"
  start=$(date +%s)
  # In the background, so that a signal to this script is heard at once.
  timeout --kill-after=12 --signal=INT "$most" "$@" >"$work/$name.log" 2>&1 </dev/null &
  child=$!
  wait "$child"
  status=$?
  child=
  took=$(($(date +%s) - start))
  tail -n "${SHOWN:-25}" "$work/$name.log" | cut -c 1-300
  case $status in
  0) said=ok ;;
  124 | 137) said="ended after its $most s" ;;
  *) said="status $status" ;;
  esac
  [ "$status" = 0 ] || failed=1
  echo "$name: $said, $took s" | tee -a "$summary"
  pack
}

# suite PART SECONDS [ARGUMENTS]: a part of the GPU suite. It goes on where it was, by the files it left.
suite() {
  of=$1
  most=$2
  shift 2
  if [ -n "$DRY" ]; then
    step "$of" 60 "$PYTHON" -m microbench.gpu_suite --list --part "$of" "$@"
    return
  fi
  room=$(left)
  [ "$most" -le "$room" ] || most=$room
  # The suite is to end by itself, with its files written.
  step "$of" "$most" "$PYTHON" -m microbench.gpu_suite --part "$of" --out "$work" --limit "$((most - 14))" "$@"
}

# long NAME SECONDS COMMAND...: a step that a dry run leaves out.
long() {
  if [ -n "$DRY" ]; then
    name=$1
    most=$2
    shift 2
    echo "$name: would run for at most $most s: $*" | tee -a "$summary"
    pack
    return
  fi
  step "$@"
}

site=$WORK/site
if [ ! -d "$site" ] && ls "$WHEELS"/*.whl >/dev/null 2>&1; then
  step wheels 60 "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
fi
[ ! -d "$site" ] || export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

case $part in
1)
  long card 20 nvidia-smi
  SHOWN=40 step check 60 "$PYTHON" -m microbench.gpu_suite --check
  SHOWN=60 step smoke 75 "$PYTHON" -m microbench.cuda.smoke --out "$work/smoke.json"
  suite driver 90
  suite design 310
  long doctor 20 "$PYTHON" -m gpumux.cli.main doctor
  long packages 20 "$PYTHON" -m pip list
  long first-figure 90 "$PYTHON" -m microbench.overhead --device cuda --jobs bert_base:infer --repeats 1 --out "$work/first-figure.json"
  ;;
2)
  suite contract 420
  suite models 380
  suite operators 380
  suite details 170 --only piece_delay depth copies
  suite compiled 520
  ;;
3)
  long overhead 210 "$PYTHON" -m microbench.overhead --device cuda --jobs resnet50:train bert_base:infer gpt2:train --repeats 3 \
    --out "$work/overhead.json"
  long collocate 345 "$PYTHON" -m microbench.collocate --pairs bert_base:infer+resnet50:train --ways "gpumux guarded" "plain streams" \
    "time slicing" MPS --seconds 6 --settle 3 --limit 320 --out "$work/collocate.json"
  ;;
esac
pack
echo
cat "$summary"
echo "everything is in $work, and packed in $OUT/first-contact-$part.tgz"
exit "$failed"
