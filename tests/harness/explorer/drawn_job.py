# SPDX-License-Identifier: Apache-2.0
"""The drawing of jobs: valid by construction, asymmetric on purpose."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any, TypeVar

from megatron_moevement.policy.window.ordering import Ordering
from tests.harness.combinations import SETTINGS
from tests.harness.explorer.job import (
    DrawnJob,
    Layout,
    Model,
    Protection,
    Source,
    Training,
)

T = TypeVar("T")

LAYOUTS: tuple[tuple[int, Layout], ...] = (
    (5, Layout(pp=2)),
    (4, Layout(pp=3)),
    (4, Layout(pp=2, vpp=2)),
    (2, Layout(pp=3, vpp=2)),
    (2, Layout(dp=2)),
    (1, Layout(dp=3)),
    (6, Layout(dp=2, ep=2)),
    (3, Layout(pp=2, dp=2)),
    (6, Layout(pp=2, dp=2, ep=2)),
    (2, Layout(tp=2)),
    (2, Layout(tp=2, ep=2)),
    (2, Layout(pp=2, tp=2)),
    (2, Layout(dp=4, ep=2)),
    (1, Layout(pp=2, dp=2, ep=2, vpp=2)),
    (1, Layout(pp=3, dp=2, ep=2)),
    (1, Layout(pp=2, dp=3)),
)
"""How often each layout is drawn: mostly two to four ranks."""
_MOST_LAYERS = 6
_DENSE = 0.15
"""Of the models without expert parallelism."""
_ORDERED = 0.4
"""Of the models with experts: jobs that order them by what is counted."""
_ORDERS = tuple(each.value for each in Ordering if each is not Ordering.INDEX)
_CHOOSING = 0.3
"""Of all jobs: those that choose their own W."""
_SAVED_BESIDE = 0.5
"""Of the jobs that save while they train."""
_TIERED = 0.3
"""Of all jobs: those that write persisted windows to a folder."""
_LARGEST = 8
_MORE_STEPS = 8
"""At least, where W is chosen: a smaller one comes after several windows with slack."""
_RANKS_OF_DOMAINS = 4
"""A job of fewer has too few failure domains of several processes."""
_WIDE: dict[str, Any] = {
    "hidden": 128,
    "ffn": 256,
    "expert_ffn": 32,
    "experts": 4,
    "vocabulary": 1024,
}
LOPSIDED: tuple[DrawnJob, ...] = (
    DrawnJob(
        Layout(dp=2, ep=2),
        Model(layers_per_chunk=2, sequence=32, tied=True, **_WIDE),
        Training(passes=2, optimizer="distributed"),
        Protection(window=3),
    ),
    DrawnJob(
        Layout(pp=2, dp=2, ep=2),
        Model(layers_per_chunk=2, sequence=32, **_WIDE),
        Training(passes=2, optimizer="distributed", precision="bf16"),
        Protection(window=3),
    ),
)
"""Jobs in which the first slots of one expert-parallel rank hold experts, of another one nothing.

The shards of the rest differ in size. It takes a wide embedding, narrow experts, and few of them.
"""


def draw_job(random: Random) -> DrawnJob:
    """Draws a job."""
    return _with_tiers(_with_saves(_with_schedules(_draw_plain(random))))


def _with_tiers(job: DrawnJob) -> DrawnJob:
    """Lets some jobs write tiers; what is drawn otherwise stays the same."""
    random = Random(f"tiers of {job}")  # noqa: S311
    if random.random() >= _TIERED:
        return job
    interval, by_url = weighted(random, ((3, 1), (1, 2))), random.random() < 1 / 3
    protection = dataclasses.replace(job.protection, tier_interval=interval, tiers_by_url=by_url)
    return dataclasses.replace(job, protection=protection)


def _with_saves(job: DrawnJob) -> DrawnJob:
    """Lets some jobs save beside training; what is drawn otherwise stays the same."""
    if not job.training.save_every:
        return job
    beside = Random(f"saves of {job}").random() < _SAVED_BESIDE  # noqa: S311
    return dataclasses.replace(job, training=dataclasses.replace(job.training, saves_beside=beside))


def _with_schedules(job: DrawnJob) -> DrawnJob:
    """Lets schedules of some jobs change; what is drawn otherwise stays the same."""
    random = Random(f"schedules 3 of {job}")  # noqa: S311  (seeds of --without stay)
    protection, training = job.protection, job.training
    if job.model.experts and random.random() < _ORDERED:
        protection = dataclasses.replace(protection, order=random.choice(_ORDERS))
    if random.random() < _CHOOSING:
        window = random.randint(max(2, protection.window), _LARGEST)
        seed = random.randrange(1, 1000)
        protection = dataclasses.replace(protection, window=window, bandwidths=seed)
        steps = random.randint(_MORE_STEPS, 2 * _MORE_STEPS)
        training = dataclasses.replace(training, steps=training.steps + steps)
    return dataclasses.replace(job, protection=protection, training=training)


def _draw_plain(random: Random) -> DrawnJob:
    if random.random() < 0.16:
        return _draw_lopsided(random)
    layout = weighted(random, LAYOUTS)
    protection = _draw_protection(random)
    if layout.ranks >= _RANKS_OF_DOMAINS:
        domain = weighted(random, ((2, 1), (1, 2)))
        protection = dataclasses.replace(protection, domain=domain)
    return DrawnJob(
        layout,
        _draw_model(random, layout),
        _draw_training(random, layout, protection),
        protection,
    )


def _draw_lopsided(random: Random) -> DrawnJob:
    """Draws one of the lopsided jobs, with what does not change the sizes of its slots."""
    job = random.choice(LOPSIDED)
    training = dataclasses.replace(
        job.training,
        steps=2 * job.protection.window + random.randint(5, 12),
        micro=random.randint(1, 2),
        passes=random.randint(2, 3),
        dropout=weighted(random, ((2, "no-dropout"), (1, "dropout"))),
        recompute=weighted(random, ((2, "stored"), (1, "recomputed"))),
        evaluate_every=weighted(random, ((2, 0), (1, random.randint(2, 5)))),
        save_every=weighted(random, ((2, 0), (1, random.randint(3, 8)))),
        source=weighted(random, ((1, Source.TEXT), (1, Source.MOCK))),
    )
    drawn = _draw_protection(random)
    protection = dataclasses.replace(
        drawn, window=job.protection.window, skips_frozen=True, replicas=max(1, drawn.replicas)
    )
    return dataclasses.replace(job, training=training, protection=protection)


def weighted(random: Random, choices: tuple[tuple[int, T], ...]) -> T:
    """Draws one of several things, each with its weight."""
    weights = [weight for weight, _ in choices]
    return random.choices([choice for _, choice in choices], weights)[0]


def _draw_model(random: Random, layout: Layout) -> Model:
    chunks = layout.pp * layout.vpp
    per_chunk = random.randint(1, max(1, min(3, _MOST_LAYERS // chunks)))
    if chunks == 1:
        per_chunk = random.randint(2, 4)
    room = _MOST_LAYERS - chunks * per_chunk
    uneven = layout.pp > 1 and layout.vpp == 1 and room > 0 and random.random() < 0.3
    experts = layout.ep * random.randint(1, 4)
    while experts < 2:
        experts += layout.ep
    hidden = random.choice([16, 32, 32, 48, 64])
    model = Model(
        layers_per_chunk=per_chunk,
        more_layers=random.randint(1, min(2, room)) if uneven else 0,
        hidden=hidden,
        ffn=hidden * random.choice([1, 2, 3]),
        expert_ffn=random.choice([8, 16, 32, 64, 96]),
        experts=experts,
        topk=random.randint(1, min(3, experts)),
        every=weighted(random, ((4, 1), (1, 2))),
        shared=weighted(random, ((3, 0), (1, 32), (1, 64))),
        vocabulary=random.choice([288, 320, 448, 1000, 1000, 1000, 2048, 3000]),
        sequence=random.choice([8, 16, 16, 32]),
        tied=random.random() < 0.3,
    )
    # What is drawn after it stays the same.
    is_dense = layout.ep == 1 and Random(f"experts {model}").random() < _DENSE  # noqa: S311
    return dataclasses.replace(model, experts=0) if is_dense else model


def _draw_training(random: Random, layout: Layout, protection: Protection) -> Training:
    passes = random.randint(1, 3) * (layout.pp if layout.vpp > 1 else 1)
    return Training(
        steps=2 * protection.window + random.randint(5, 12),
        micro=random.randint(1, 2),
        passes=max(passes, 2) if layout.pp > 1 else passes,
        precision=random.choice(list(SETTINGS["precision"])),
        optimizer=_draw_optimizer(random, layout),
        bucket=weighted(random, ((3, 0), (1, 2_000), (1, 20_000))),
        experts=random.choice(list(SETTINGS["experts"])),
        balance=random.choice(list(SETTINGS["balance"])),
        dropout=weighted(random, ((2, "no-dropout"), (1, "dropout"))),
        z_loss=weighted(random, ((2, "no-z-loss"), (1, "z-loss"))),
        dispatcher=random.choice(list(SETTINGS["dispatcher"])),
        recompute=weighted(random, ((2, "stored"), (1, "recomputed"))),
        evaluate_every=weighted(random, ((2, 0), (1, random.randint(2, 5)))),
        save_every=weighted(random, ((2, 0), (1, random.randint(3, 8)))),
        loads=random.random() < 0.7,
        source=weighted(random, ((1, Source.TEXT), (1, Source.MOCK))),
    )


def _draw_optimizer(random: Random, layout: Layout) -> str:
    """Draws the optimizer: with expert-parallel ranks mostly one whose shards differ in size."""
    names = list(SETTINGS["optimizer"])
    if layout.ep > 1 and random.random() < 0.6:
        names = [name for name in names if name.startswith("distributed")]
    return random.choice(names)


def _draw_protection(random: Random) -> Protection:
    return Protection(
        window=random.choice([1, 2, 3, 3, 4, 4, 4, 4, 5, 6, 8]),
        replicas=random.choices([0, 1, 2], [1, 5, 4])[0],
        copies_state=random.random() < 0.5,
        skips_frozen=random.random() < 0.85,
        logs=random.random() < 0.9,
        adopts=random.random() < 0.7,
    )
