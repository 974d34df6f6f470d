# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_moevement.cli` is the `moevement` command."""

import sys

from megatron_moevement.cli import main

sys.exit(main())
