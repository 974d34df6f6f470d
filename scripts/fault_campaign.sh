#!/usr/bin/env bash
# Strikes jobs with spares by every kind of fault, in every phase of a step, on every stage, and by
# kills from outside, in a set of rows in which every two settings meet; the lost stage has to replay
# alone, and bits to be those of uninterrupted jobs:  ./scripts/fault_campaign.sh [PYTEST ARGUMENTS...]
# Ends after FAULT_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/fault_campaign.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
sources="$(find megatron_moevement patches tests -type f -not -name '*.pyc' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16)"
passed="build/fault_campaign/$sources.txt"
code=0
timeout --signal=INT --kill-after=60s "${FAULT_CAMPAIGN_LIMIT:-60m}" \
    .venv/bin/python -m pytest -p megatron_moevement.testing.passed_tests \
    --passed-tests "$passed" -m "slow or not slow" tests/strategies/test_fault_cover.py "$@" ||
    code="$?"
nothing_left=5
if [ "$code" -eq "$nothing_left" ]; then
    echo "fault_campaign: all of these have passed already; delete $passed to run them again"
    code=0
fi
exit "$code"
