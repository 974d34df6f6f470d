# SPDX-License-Identifier: Apache-2.0
"""What a run says while it trains: iteration lines, scalars, events, a bar, plots."""
