# SPDX-License-Identifier: Apache-2.0
"""The loss curve is drawn from what was recorded."""

import matplotlib.image
import numpy as np
import pytest

from megatron_moevement.runtime.observation.events import EventLog, EventName, read_events
from megatron_moevement.training.reporting.plots import losses_from_events, plot_losses


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory):
    """Draws once before the tests: matplotlib keeps the fonts that it used open."""
    plot_losses({1: 1.0}, tmp_path_factory.mktemp("fonts") / "loss.png")


def test_losses_come_from_the_events_of_all_processes(tmp_path):
    with EventLog(tmp_path, 0, 0) as events:
        for k, loss in ((1, 3.0), (2, 2.0), (2, 2.0)):
            events.emit(EventName.ITERATION, k, loss=loss)
        events.emit(EventName.EVALUATION, 2, split="validation", loss=2.5)
        events.emit(EventName.EVALUATION, 2, split="validation", loss=1.5, is_final=True)
        events.emit(EventName.EVALUATION, 2, split="test", loss=9.0, is_final=True)
        events.emit(EventName.CHECKPOINT_SAVED, 2)
    assert losses_from_events(read_events(tmp_path)) == ({1: 3.0, 2: 2.0}, {2: 2.5}, {2: 1.5})


def test_a_picture_is_drawn_and_nothing_else_is_left(tmp_path):
    path = plot_losses(
        {1: 4.0, 2: 3.0, 3: 2.0},
        tmp_path / "loss.png",
        validation={2: 3.2},
        unigram_entropy=3.5,
        title="tiny",
    )
    assert list(tmp_path.iterdir()) == [path]
    assert matplotlib.image.imread(path).shape[:2] == (600, 960)


@pytest.mark.parametrize(
    "addition", [{"validation": {2: 3.2}}, {"final": {3: 3.2}}, {"unigram_entropy": 3.5}]
)
def test_validation_and_entropy_are_visible(tmp_path, addition):
    training = {1: 4.0, 2: 3.0, 3: 2.0}
    plain, more = (
        matplotlib.image.imread(plot_losses(training, tmp_path / f"{name}.png", **options))
        for name, options in (("plain", {}), ("more", addition))
    )
    assert np.any(plain != more)


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no loss to draw"):
        plot_losses({}, tmp_path / "loss.png")
