#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains 2,800 protected steps in two stages and looks at them from step 400 to 2,400, and recovers 50
# times: threads, descriptors and memory stay. Memory peaks at what is announced. Set-up included:
#   ./scripts/soak.sh [PYTEST ARGUMENTS...]
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -s -m slow \
    tests/strategies/test_soak.py tests/strategies/test_host_memory.py \
    tests/strategies/test_many_recoveries.py "$@"
