#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kills and relaunches jobs in a set of combinations in which every two settings meet, and compares
# their bits with uninterrupted ones:  ./scripts/recovery_campaign.sh [PYTEST ARGUMENTS...]
# Ends after RECOVERY_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/recovery_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" recovery_campaign "${RECOVERY_CAMPAIGN_LIMIT:-60m}" \
    tests/strategies/test_recovery_bits.py "$@"
