#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Stops and resumes jobs in a set of combinations in which every two settings meet, and compares
# their bits with uninterrupted ones:  ./scripts/resume_campaign.sh [PYTEST ARGUMENTS...]
# Ends after RESUME_CAMPAIGN_LIMIT (default: 2h).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=1
exec timeout --signal=INT --kill-after=60s "${RESUME_CAMPAIGN_LIMIT:-2h}" \
  .venv/bin/python -m pytest -m "slow or not slow" tests/training/test_resume_bits.py "$@"
