# SPDX-License-Identifier: Apache-2.0
"""Recovery: from facts to the plan that all ranks carry out."""
