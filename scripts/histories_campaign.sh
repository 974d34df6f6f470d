#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Strikes jobs whose losses meet each other (in a fetch, in a replay, in the first window), one after
# the other; bits have to be those of uninterrupted jobs:  ./scripts/histories_campaign.sh [PYTEST ARGUMENTS...]
# Ends after HISTORIES_CAMPAIGN_LIMIT (default: 30m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/histories_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" histories_campaign "${HISTORIES_CAMPAIGN_LIMIT:-30m}" \
    tests/strategies/test_hard_histories.py "$@"
