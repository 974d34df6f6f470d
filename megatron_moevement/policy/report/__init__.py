# SPDX-License-Identifier: Apache-2.0
"""The report of a run: what its events come to, in as much room as a page has."""
