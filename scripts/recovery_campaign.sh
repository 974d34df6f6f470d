#!/usr/bin/env bash
# Kills and relaunches jobs in a set of combinations in which every two settings meet, and compares
# their bits with uninterrupted ones:  ./scripts/recovery_campaign.sh [PYTEST ARGUMENTS...]
# Ends after RECOVERY_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/recovery_campaign.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
sources="$(find megatron_moevement patches tests -type f -not -name '*.pyc' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16)"
passed="build/recovery_campaign/$sources.txt"
code=0
timeout --signal=INT --kill-after=60s "${RECOVERY_CAMPAIGN_LIMIT:-60m}" \
    .venv/bin/python -m pytest -p megatron_moevement.testing.passed_tests \
    --passed-tests "$passed" -m "slow or not slow" tests/strategies/test_recovery_bits.py "$@" ||
    code="$?"
nothing_left=5
if [ "$code" -eq "$nothing_left" ]; then
    echo "recovery_campaign: all of these have passed already; delete $passed to run them again"
    code=0
fi
exit "$code"
