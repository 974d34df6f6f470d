# SPDX-License-Identifier: Apache-2.0
"""What tests of real jobs are made of: fork server, explorer, fuzzer, leak check, tiny job."""
