#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a file or folder of tests, slow ones included, within a time limit, set-up included:
#   ./scripts/resumable_campaign.sh NAME LIMIT TESTS [PYTEST ARGUMENTS...]
# When it is run again with the same sources, it goes on where it was; what has passed is in
# build/NAME.
set -euo pipefail

name="$1" limit="$2" tests="$3"
shift 3
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
sources="$(find megatron_moevement patches tests -type f -not -name '*.pyc' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16)"
passed="build/$name/$sources.txt"
code=0
timeout --signal=INT --kill-after=60s "$limit" \
    .venv/bin/python -m pytest -p tests.harness.passed_tests \
    --passed-tests "$passed" -m "slow or not slow" "$tests" "$@" ||
    code="$?"
nothing_left=5
if [ "$code" -eq "$nothing_left" ]; then
    echo "$name: all of these have passed already; delete $passed to run them again"
    code=0
fi
exit "$code"
