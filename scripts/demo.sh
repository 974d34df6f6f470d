#!/usr/bin/env bash
# Trains a small Mixture-of-Experts model on real text, from nothing: sets up, prepares the sources of
# Python's standard library, trains with two pipeline stages and two expert-parallel ranks, evaluates,
# and says where everything is. Arguments are added to the training's flags.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"

python="$root/.venv/bin/python"
moevement="$root/.venv/bin/moevement"
data="$root/runs/demo/data/stdlib"
run="$root/runs/demo/$(date +%Y%m%d-%H%M%S)"
mkdir -p "$run" "$(dirname "$data")"

if [[ ! -e "$data.idx" ]]; then
    "$moevement" data prepare --append-eod --output-prefix "$data" --pattern '*.py' \
        --exclude site-packages test tests idlelib \
        --input "$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
fi

MODEL_ARGS=(--model-preset tiny)
MODEL_PARALLEL_ARGS=(--pipeline-model-parallel-size 2 --expert-model-parallel-size 2)
DATA_ARGS=(--data-path "$data" --tokenizer-type ByteTokenizer --split "99,1,0")
TRAINING_ARGS=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters 200
    --lr 4e-3 --lr-decay-style cosine --lr-warmup-iters 10
    --eval-interval 50 --eval-iters 4 --save "$run/checkpoints" --save-interval 100
)
LOGGING_ARGS=(
    --log-interval 20 --tensorboard-dir "$run/tensorboard" --moevement-event-dir "$run/events"
    --moevement-state-digest "$run/digest.json"
)

"$root/scripts/run_local.sh" -n 4 -- "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@" 2>&1 | tee "$run/train.log"

"$moevement" losses "$run/events" --data "$data" --picture "$run/losses.png"
cat <<END
log         $run/train.log
plot        $run/losses.png
TensorBoard $run/tensorboard
checkpoint  $run/checkpoints
digest      $run/digest.json
END
