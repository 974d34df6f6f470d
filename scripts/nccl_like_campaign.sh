#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Strikes jobs over a process group that behaves towards its host as NCCL's does (tests/harness/nccl_like):
# rows of the fault cover on PP2 x EP2 and PP3 x DP2, adjacent stages, slow newcomers, faults while ranks
# connect, garbage of aborted collectives:  ./scripts/nccl_like_campaign.sh [PYTEST ARGUMENTS...]
# `-k without` takes one mend out after the other, and sees the job lost that it is for.
# Ends after NCCL_LIKE_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/nccl_like_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" nccl_like_campaign \
    "${NCCL_LIKE_CAMPAIGN_LIMIT:-60m}" tests/strategies/test_nccl_like.py "$@"
