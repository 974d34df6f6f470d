#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills several processes of a job at one moment: of one stage, of adjacent and disjoint stages, both
# ends, all ranks, whole failure domains. The lost stages have to replay, the others stand by, and
# bits to be those of uninterrupted jobs:  ./scripts/losses_campaign.sh [PYTEST ARGUMENTS...]
# Ends after LOSSES_CAMPAIGN_LIMIT (default: 120m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/losses_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" losses_campaign \
    "${LOSSES_CAMPAIGN_LIMIT:-120m}" tests/strategies/test_losses.py "$@"
