# SPDX-License-Identifier: Apache-2.0
"""The tests: a package, so that linters and programs that tests start find `tests.harness`."""
