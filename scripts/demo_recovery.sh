#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills every process of a training job with SIGKILL, launches it again, and compares the end with that
# of a job that nobody killed: the state of every operator, and the loss of every iteration, bit for bit.
# No durable checkpoint is involved. Arguments are added to the flags of both jobs.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"

run="$root/runs/demo-recovery/$(date +%Y%m%d-%H%M%S)"
mkdir -p "$run"

TRAINING_ARGS=(
    --model-preset tiny --num-layers 4 --hidden-size 64
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --bf16 --use-distributed-optimizer
    --mock-data --tokenizer-type NullTokenizer --vocab-size 319 --seq-length 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 30 --lr 4e-3 --eval-iters 0
    --log-interval 1 --moevement-no-progress-bar
)
PROTECTION_ARGS=(
    --moevement-strategy moevement --moevement-window 3 --moevement-replicas 2
    --moevement-run-id "demo-recovery-$$" --moevement-event-dir "$run/events"
)

train() { # DIGEST FLAGS...
    "$root/scripts/run_local.sh" -n 4 -- "${TRAINING_ARGS[@]}" --moevement-state-digest "$run/$1.json" "${@:2}"
}

echo "1. a job that nobody kills, and nothing protects"
train uninterrupted >"$run/uninterrupted.log" 2>&1

touch "$run/killed.log"
echo "2. the same job, protected; all of its processes are killed after iteration 15"
train killed "${PROTECTION_ARGS[@]}" "$@" >"$run/killed.log" 2>&1 &
launcher=$!
until grep -q "iteration  *15/" "$run/killed.log"; do
    kill -0 "$launcher" || { tail "$run/killed.log"; exit 1; }
    sleep 0.05
done
pkill -KILL -P "$launcher" # the ranks' launcher: the kernel kills the ranks with it
wait "$launcher" || true

echo "3. launched again"
train recovered "${PROTECTION_ARGS[@]}" "$@" 2>&1 | tee "$run/recovered.log" | grep -v " iteration "

cmp "$run/uninterrupted.json" "$run/recovered.json"
echo "same bits: $run/uninterrupted.json and $run/recovered.json are equal"
