#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills jobs at random moments while they write their tiers, takes their memory away and launches them
# again; bits have to be those of uninterrupted jobs:  ./scripts/tier_campaign.sh [PYTEST ARGUMENTS...]
# TIER_KILLS kills (default: 20) at moments drawn from TIER_SEED (0); ends after TIER_CAMPAIGN_LIMIT (default: 30m). What has passed is in
# build/tier_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" tier_campaign "${TIER_CAMPAIGN_LIMIT:-30m}" \
    tests/strategies/test_tiers.py -s "$@"
