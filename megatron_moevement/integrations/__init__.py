# SPDX-License-Identifier: Apache-2.0
"""The only places that know the names of upstream projects."""
