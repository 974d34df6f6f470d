#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, trains a small Mixture-of-Experts model on the sources of Python's standard library, kills a
# rank of the same job half-way through its last quarter, and compares every bit of the two ends. Fails unless
# the validation loss is clearly below the unigram entropy of the text, only the lost stage was replayed and
# nothing differs. Arguments are added to the flags of both jobs.
# From the environment: ITERATIONS (default 200), RUNS (where results go, default runs/ of the repository).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"

python="$root/.venv/bin/python"
moevement="$root/.venv/bin/moevement"
runs="${RUNS:-$root/runs}/demo"
data="$runs/data/stdlib"
run="$runs/$(date +%Y%m%d-%H%M%S)"
iterations="${ITERATIONS:-200}"
resumed_from=$((iterations * 3 / 4))
killed_in=$((iterations * 7 / 8))
mkdir -p "$run/killed" "$(dirname "$data")"

if [[ ! -e "$data.idx" ]]; then
    "$moevement" data prepare --append-eod --output-prefix "$data" --pattern '*.py' \
        --exclude site-packages test tests idlelib \
        --input "$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
fi

MODEL_ARGS=(--model-preset tiny --untie-embeddings-and-output-weights)
MODEL_PARALLEL_ARGS=(--pipeline-model-parallel-size 2 --expert-model-parallel-size 2)
DATA_ARGS=(--data-path "$data" --tokenizer-type ByteTokenizer --split "99,1,0")
TRAINING_ARGS=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$iterations"
    --lr 4e-3 --lr-decay-style cosine --lr-warmup-iters 10
    --eval-interval $((iterations / 4)) --eval-iters 4 --moevement-no-progress-bar
)
JOB_ARGS=("${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}")
# With a W of its own, so that no choice of another one changes how many steps are replayed.
MOEVEMENT_ARGS=(
    --moevement-strategy moevement --moevement-window 4 --inprocess-restart --moevement-run-id "demo-$$"
)
FAULT_ARGS=(--moevement-faults "kill:$killed_in:backward@2")

echo
echo "1. A job that nothing interrupts: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks."
"$root/scripts/run_local.sh" -n 4 -- "${JOB_ARGS[@]}" \
    --save "$run/checkpoints" --save-interval $((iterations / 4)) --log-interval $((iterations / 10)) \
    --tensorboard-dir "$run/tensorboard" --moevement-event-dir "$run/events" \
    --moevement-state-digest "$run/digest.json" "$@" 2>&1 | tee "$run/train.log"
"$moevement" losses "$run/events" --data "$data" --picture "$run/losses.png" --below-entropy 0.3

echo
echo "2. The same job from the checkpoint of iteration $resumed_from on, protected, with a spare."
echo "   SIGKILL strikes rank 2, in stage 1, in the backward pass of iteration $killed_in."
"$root/scripts/run_local.sh" -n 4 -s 1 -- "${JOB_ARGS[@]}" "${MOEVEMENT_ARGS[@]}" "${FAULT_ARGS[@]}" \
    --load "$run/checkpoints" --ckpt-step "$resumed_from" --log-interval $((iterations / 20)) \
    --moevement-event-dir "$run/killed/events" \
    --moevement-state-digest "$run/killed/digest.json" "$@" 2>&1 | tee "$run/killed/train.log"

echo
echo "3. What the recovery was, and whether the two jobs ended with the same bits."
"$moevement" recoveries "$run/killed/events" --require LOCALIZED
"$moevement" losses "$run/killed/events" --picture "$run/killed/losses.png" >/dev/null
"$moevement" report "$run/killed/events" --out "$run/killed/report.html"
if ! cmp "$run/digest.json" "$run/killed/digest.json"; then
    echo "the two digests differ: the recovery changed bits" >&2
    exit 1
fi
echo "same bits: state and losses of the killed job are those of the job that nothing interrupted"
cat <<END

                 uninterrupted            killed
log              train.log                killed/train.log
plot             losses.png               killed/losses.png
events           events/                  killed/events/
report                                    killed/report.html
digest           digest.json              killed/digest.json
checkpoint       checkpoints/
TensorBoard      tensorboard/
all of it in     $run
END
