# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie in a slot: aligned, apart from each other, all of them, within the buffer."""

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

JOBS = {
    "fp32": (1, []),
    "bf16-grouped-bias": (
        1,
        [
            "--bf16",
            "--moe-grouped-gemm",
            "--moe-router-score-function=sigmoid",
            "--moe-router-enable-expert-bias",
        ],
    ),
    "dp2-sharded-fp16": (2, ["--fp16", "--use-distributed-optimizer"]),
}


def lay_out(flags, windows):
    """Checks the layouts of a job for some W; returns how many parts there are."""
    import torch  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.slot_layout import (  # noqa: PLC0415
        ALIGNMENT_BYTES,
        slot_layouts,
    )
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from megatron_moevement.policy.job.operators import Inventory  # noqa: PLC0415
    from megatron_moevement.policy.job.ranks import LogicalRank  # noqa: PLC0415
    from megatron_moevement.policy.job.state_recipe import Content  # noqa: PLC0415
    from megatron_moevement.policy.window.ordering import Ordering, order_operators  # noqa: PLC0415
    from megatron_moevement.policy.window.window_planner import plan_window  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    rank, parts = LogicalRank(), []
    with tiny_job(*flags) as job:
        live = LiveOperators(job.chunks, job.optimizer)
        inventory = Inventory({rank: live.operators})
        order = order_operators(inventory.sorted_operators, Ordering.INDEX)
        for window in windows:
            schedule = plan_window(inventory, order, window=window).schedule
            layouts = slot_layouts(schedule, rank, live)
            for slot, layout in enumerate(layouts):
                full = {part.operator for part in layout.parts if part.content is Content.FULL}
                rest = {part.operator for part in layout.parts if part.content is Content.COMPUTE}
                assert (full, rest) == (schedule.full[slot], schedule.compute[slot])
                assert layout.captured_bytes == schedule.bytes_by_slot[rank][slot]
                owner = torch.full((layout.size_bytes,), -1, dtype=torch.int32)
                buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
                for number, part in enumerate(layout.parts):
                    assert part.offset % ALIGNMENT_BYTES == 0
                    place = owner[part.offset : part.offset + part.size_bytes]
                    assert place.numel() == part.size_bytes
                    assert bool((place == -1).all())
                    place.fill_(number)
                    covered = 0
                    for piece, view in zip(part.pieces, part.views(buffer), strict=True):
                        assert (view.dtype, view.shape) == (piece.dtype, piece.elements.shape)
                        assert view.data_ptr() == buffer.data_ptr() + part.offset + covered
                        covered += view.nbytes
                    assert covered == part.size_bytes
                assert layout.size_bytes <= layout.captured_bytes + ALIGNMENT_BYTES * len(
                    layout.parts
                )
                parts.append(len(layout.parts))
    return parts


@pytest.mark.parametrize("name", JOBS)
def test_every_tensor_has_a_place_of_its_own(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    windows = [1, 2, 5]
    job = megatron_fork_server.run(lay_out, world_size=ranks, args=[flags, windows])
    for parts in job.check().values:
        assert len(parts) == sum(windows)
        assert all(parts)


def read_in_ranges(flags):
    """Reads the live state of each operator in one piece and in several; returns how many bytes."""
    from itertools import pairwise  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.slot_layout import Part  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from megatron_moevement.policy.job.state_recipe import Content  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    read_bytes = 0
    with tiny_job(*flags) as job:
        live = LiveOperators(job.chunks, job.optimizer)
        for operator in live.operators:
            for content in Content:
                part = Part(operator.id, content, 0, live.pieces(operator.id, content))
                size = part.size_bytes
                buffer = torch.zeros(size, dtype=torch.uint8)
                views = part.views(buffer)
                for piece, view in zip(part.pieces, views, strict=True):
                    view.copy_(piece.elements)
                whole = bytes(buffer.numpy().data)
                ends = sorted({0, size // 7, size // 3, size // 2 + 1, size})
                assert bytes(part.read(slice(None))) == whole
                assert b"".join(bytes(part.read(slice(*each))) for each in pairwise(ends)) == whole
                assert bytes(part.read(slice(size, size + 5))) == b""
                read_bytes += size
    return read_bytes


@pytest.mark.parametrize("name", JOBS)
def test_any_bytes_of_an_operator_can_be_read(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(read_in_ranges, world_size=ranks, args=[flags])
    assert all(job.check().values)
