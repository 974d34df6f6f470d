#!/usr/bin/env bash
# Trains 2,400 protected steps, and recovers 50 times: threads, descriptors and memory stay. Set-up included:
#   ./scripts/soak.sh [PYTEST ARGUMENTS...]
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -s -m slow \
    tests/strategies/test_soak.py tests/strategies/test_many_recoveries.py "$@"
