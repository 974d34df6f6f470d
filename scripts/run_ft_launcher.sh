#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on this machine under ft_launcher of nvidia-resiliency-ext, which restarts processes:
#   ./scripts/run_ft_launcher.sh -n N [-s S] [--metrics-address HOST:PORT] [FT_LAUNCHER_FLAGS...] -- FLAGS...
# N ranks train. With --inprocess-restart among FLAGS, S spares stand by, and each process has an
# agent of its own: an agent stops all of its processes when one dies. The agents meet at a store
# that no rank hosts; they restart the job when fewer than N processes are left. What hosts that
# store serves metrics at --metrics-address (docs/operate/metrics.md; default: nowhere).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
BIN="$ROOT/.venv/bin"
PYTHON="$BIN/python"
[ -x "$PYTHON" ] || PYTHON=python3 # in a container the package is installed beside torch
LAUNCHER="$BIN/ft_launcher"
[ -x "$LAUNCHER" ] || LAUNCHER=ft_launcher
PROGRAM="$ROOT/pretrain_moe.py"
[ -f "$PROGRAM" ] || PROGRAM="$("$PYTHON" -c 'import pretrain_moe; print(pretrain_moe.__file__)')"

ranks="" spares=0 metrics=()
own=(--max-restarts 3 --monitor-interval 1 --ft-enable-nic-monitor false)
while [ $# -gt 0 ]; do
    case "$1" in
    -n) ranks="$2" && shift 2 ;;
    -s) spares="$2" && shift 2 ;;
    --metrics-address) metrics=("$1" "$2") && shift 2 ;;
    --) shift && break ;;
    *) own+=("$1") && shift ;;
    esac
done
[ -n "$ranks" ] || { echo "run_ft_launcher.sh: give -n RANKS" >&2 && exit 2; }
processes=$((ranks + spares))
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
run="${RUN_ID:-moevement-$$}"
own+=(--rdzv-backend c10d --rdzv-id "$run" --local-addr 127.0.0.1)

# What the ranks prove to each other that they belong together with; no command line has it.
MOEVEMENT_SECRET="$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')"
export MOEVEMENT_SECRET

in_place=false
[[ " $* " != *" --inprocess-restart "* ]] || in_place=true
if [ "$spares" -ne 0 ] && ! "$in_place"; then
    echo "run_ft_launcher.sh: -s needs --inprocess-restart" >&2
    exit 2
fi
if [ "${#metrics[@]}" -ne 0 ] && ! "$in_place"; then
    echo "run_ft_launcher.sh: --metrics-address needs --inprocess-restart" >&2
    exit 2
fi

# Agents leave sockets of their rank monitors where temporary files are; what torch compiled stays.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id -un)}"
TMPDIR="$(mktemp -d)"
export TMPDIR
agents=() host="" patience_s=0
# shellcheck disable=SC2329 # the trap calls it
finish() {
    for ((tenths = 0; tenths < patience_s * 10; tenths++)); do
        kill -0 "${agents[@]}" 2>/dev/null || break
        sleep 0.1
    done
    # The ranks meet at the stores to the end: without them they would stop for another launch.
    [ "${#agents[@]}" -eq 0 ] || kill "${agents[@]}" 2>/dev/null || true
    [ "${#agents[@]}" -eq 0 ] || wait "${agents[@]}" || true
    [ -z "$host" ] || kill "$host" 2>/dev/null || true
    wait || true
    rm -rf "$TMPDIR"
}
trap finish EXIT

# An agent passes on the first signal to its ranks; a second one at once would cut that short, and
# some ranks would never hear of Ctrl-C. So agents have sessions of their own, and hear of it from
# here. One that waits for others at the start hears of nothing, and is ended later.
own_session=(setsid env --default-signal=INT) # a shell's background jobs ignore it otherwise
# shellcheck disable=SC2329 # the trap calls it
interrupt() {
    trap '' INT
    patience_s=10
    # shellcheck disable=SC2046 # a word each
    kill -INT $(jobs -p) 2>/dev/null || true
    exit 130
}
trap interrupt INT

# An agent starts this for each rank. Agents lack how a killed rank ended, and record nothing; the
# environment here is the rank's own. A signal of an agent reaches both this and the rank.
# shellcheck disable=SC2016 # the process's shell expands these
TASK='trap : INT TERM
code=0
begun="$(date +%s.%N)"
"$0" -u "$@" || code=$?
if [ "$code" -ne 0 ] && [ "$code" -ne 130 ]; then # after Ctrl-C no process goes on
    PYTHONPATH="$(dirname "$1")${PYTHONPATH:+:$PYTHONPATH}" timeout --foreground --kill-after 1 20 \
        "$0" -m megatron_moevement.cli ended --code "$code" --begun "$begun" -- "${@:2}" || true
fi
exit "$code"'
rank=(--no-python bash -c "$TASK" "$PYTHON" "$PROGRAM" "$@")

if ! "$in_place"; then
    "${own_session[@]}" "$LAUNCHER" "${own[@]}" --nnodes 1 --nproc-per-node "$ranks" \
        --rdzv-endpoint 127.0.0.1:0 "${rank[@]}" &
    agents=("$!")
    wait "$!"
    exit
fi

stores="$TMPDIR/stores"
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m megatron_moevement.cli stores \
    "${metrics[@]}" -- "$@" >"$stores" &
host="$!"
until [ -s "$stores" ]; do
    kill -0 "$host" 2>/dev/null || { wait "$host" || exit; }
    sleep 0.05
done
for pair in $(<"$stores"); do export "${pair?}"; done
export MOEVEMENT_ACTIVE_RANKS="$ranks"

for ((number = 0; number < processes; number++)); do
    CUDA_VISIBLE_DEVICES="$number" MOEVEMENT_FAILURE_DOMAIN="${MOEVEMENT_FAILURE_DOMAIN:-$number}" \
        "${own_session[@]}" "$LAUNCHER" "${own[@]}" --nnodes "$ranks:$processes" --nproc-per-node 1 \
        --ft-restart-policy min-healthy --rdzv-conf is_host=false \
        --rdzv-endpoint "$MOEVEMENT_STORE_ADDR:$MOEVEMENT_STORE_PORT" "${rank[@]}" &
    agents+=("$!")
done
code=0
for agent in "${agents[@]}"; do
    wait "$agent" || code=$?
done
exit "$code"
