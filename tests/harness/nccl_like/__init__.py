# SPDX-License-Identifier: Apache-2.0
"""A process group that behaves towards its host as NCCL's does, over gloo, for tests on a CPU."""
