#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Strikes jobs with spares by every kind of fault, in every phase of a step and at every moment of a
# change of the window schedule, on every stage, and by kills from outside, in a set of rows in which
# every two settings meet; the lost stage has to replay alone (all stages where nothing is logged), and
# bits to be those of uninterrupted jobs:  ./scripts/fault_campaign.sh [PYTEST ARGUMENTS...]
# Ends after FAULT_CAMPAIGN_LIMIT (default: 60m). When it is run again with the same sources, it
# goes on where it was; what has passed is in build/fault_campaign.
set -euo pipefail

exec "$(dirname "${BASH_SOURCE[0]}")/resumable_campaign.sh" fault_campaign "${FAULT_CAMPAIGN_LIMIT:-60m}" \
    tests/strategies/test_fault_cover.py "$@"
