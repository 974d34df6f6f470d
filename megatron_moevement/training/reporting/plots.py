# SPDX-License-Identifier: Apache-2.0
"""The loss curve as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_moevement.policy.accounting.steps import losses_of
from megatron_moevement.runtime.observation.events import EventName, EventRecord

VALIDATION = "validation"
AT_END = " at the end"
"""Ends the name of the validation loss after the training, which has other samples."""


def has_losses(record: EventRecord) -> bool:
    """Whether an event has a loss: one rank records those of training."""
    return not {"loss", "losses"}.isdisjoint(record.fields)


def losses_from_events(
    events: Sequence[EventRecord],
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Returns the losses by iteration: of training, of validation on the way, and after it.

    A repeated iteration repeats it: the newest counts.
    """
    training: dict[int, float] = {}
    validation: dict[int, float] = {}
    final: dict[int, float] = {}
    for record in events:
        if record.event in {EventName.ITERATION, EventName.LOSSES}:
            found = losses_of(record.fields)
            for step, loss in enumerate(found, record.iteration - len(found) + 1):
                if loss is not None:
                    training[step] = float(loss)
        elif record.event is EventName.EVALUATION and record.fields["split"] == VALIDATION:
            losses = final if record.fields.get("is_final") else validation
            losses[record.iteration] = float(record.fields["loss"])
    return training, validation, final


def plot_losses(
    training: Mapping[int, float],
    path: str | Path,
    *,
    validation: Mapping[int, float] | None = None,
    final: Mapping[int, float] | None = None,
    unigram_entropy: float | None = None,
    title: str = "",
) -> Path:
    """Draws the losses over the iterations and returns the path of the picture.

    Args:
        training: iteration to loss, in nats per token.
        path: where the picture goes; its suffix says the format.
        validation: iteration to loss on the validation split.
        final: the same, after the training.
        unigram_entropy: what a model reaches that knows only how frequent each token is.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not training:
        raise ValueError(f"there is no loss to draw in {path}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (takes a second)
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Without pyplot: it would keep the figure, and choose a display, for the whole process.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for losses, style, label in (
        (training, {"linewidth": 1.0}, "training"),
        (validation or {}, {"marker": "o"}, VALIDATION),
        (final or {}, {"marker": "x", "linestyle": ""}, VALIDATION + AT_END),
    ):
        if losses:
            iterations = sorted(losses)
            axes.plot(iterations, [losses[k] for k in iterations], label=label, **style)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, linestyle="--", color="gray", label="unigram entropy")
    axes.set(xlabel="iteration", ylabel="lm loss (nats per token)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    return _save(figure, Path(path))


def _save(figure: object, path: Path) -> Path:
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    figure.savefig(partial, dpi=120)  # type: ignore[attr-defined]
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path
