#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Strikes real jobs with what no fault place knows: all holders of a slot lost at once, a process
# that wakes up after it was given up, a parted network, memory that runs out in a recovery, clocks
# that are set, bits that flip in logs and on the wire:
#   ./scripts/cascades_campaign.sh [PYTEST ARGUMENTS...]
# Ends after CASCADES_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/cascades_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" cascades_campaign \
    "${CASCADES_CAMPAIGN_LIMIT:-60m}" tests/strategies/cascades "$@"
