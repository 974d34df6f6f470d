# SPDX-License-Identifier: Apache-2.0
"""The results of seeds, one line of JSON each: what was drawn, and what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.harness.explorer.oracle import Complaint
from tests.harness.explorer.outcome import Outcome
from tests.harness.explorer.scenario import Scenario
from tests.harness.explorer.timeline import Timeline

_ROOT = Path(__file__).parents[3]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a seed.

    Attributes:
        seed: the seed.
        sources: digest of the sources that ran.
        complaints: of the oracle; none when all was well.
        seconds: that the runs took.
        layout: of the ranks.
        shape: of the job, by names of features.
        window: W.
        replicas: r.
        strikes: faults and kills that were drawn.
        kinds: of faults that struck, and `outside`.
        places: at which faults struck.
        verdicts: of the recoveries.
        replayed: the most steps that each recovery replayed.
        lost: committed steps that were lost, of each recovery that lost any.
        launches: of the job.
        from_tiers: steps of the tiers that they went on from.
        story: folder of a failure.
    """

    seed: int
    sources: str
    complaints: tuple[str, ...]
    seconds: float
    layout: str
    shape: tuple[str, ...]
    window: int
    replicas: int
    strikes: int
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    verdicts: tuple[str, ...]
    replayed: tuple[int, ...]
    lost: tuple[int, ...]
    launches: int
    from_tiers: tuple[int, ...] = ()
    story: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether anything was not as promised."""
        return bool(self.complaints)


class Results:
    """The lines of a file; a process appends to it, another one goes on later."""

    def __init__(self, path: Path) -> None:
        """Names the file, which need not be there."""
        self._path = path

    def add(self, result: Result) -> None:
        """Appends a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")

    def read(self, sources: str | None = None) -> list[Result]:
        """Returns what was found, with some sources or with any; the newest of each seed.

        A line that a killed explorer left incomplete is none.
        """
        if not self._path.exists():
            return []
        found: dict[tuple[int, str], Result] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                document = json.loads(line)
            except json.JSONDecodeError:
                continue
            result = _result_of(document)
            if sources in {None, result.sources}:
                found[result.seed, result.sources] = result
        return sorted(found.values(), key=lambda result: result.seed)


def _result_of(document: dict[str, Any]) -> Result:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return Result(**fields)


def result_of(
    scenario: Scenario, outcome: Outcome, complaints: Iterable[Complaint], sources: str
) -> Result:
    """Returns the result of a scenario that ran."""
    timeline = Timeline(outcome, scenario.job.protection)
    struck = [fault for launch in outcome.launches for _, fault in launch.struck()]
    outside = sum(len(launch.killed) for launch in outcome.launches)
    recoveries = [each for each in timeline.recoveries if each.plan is not None]
    carried_out = [each for each in timeline.recoveries if timeline.has_come_back(each)]
    lost = [each.newest - each.target for each in carried_out]
    return Result(
        seed=-1 if scenario.seed is None else scenario.seed,
        sources=sources,
        complaints=tuple(f"{each.check}: {each.detail}" for each in complaints),
        seconds=round(sum(launch.seconds for launch in outcome.launches), 1),
        layout=scenario.job.layout.name,
        shape=features(scenario),
        window=scenario.job.protection.window,
        replicas=scenario.job.protection.replicas,
        strikes=scenario.history.strikes,
        kinds=(*(fault.kind.value for fault in struck), *("outside",) * outside),
        places=tuple(fault.place.value for fault in struck),
        verdicts=tuple(each.plan.verdict.value for each in recoveries if each.plan is not None),
        replayed=tuple(each.plan.replayed_steps for each in recoveries if each.plan is not None),
        lost=tuple(steps for steps in lost if steps > 0),
        launches=len(outcome.launches),
        from_tiers=tuple(step for _, step in timeline.from_tiers),
    )


def features(scenario: Scenario) -> tuple[str, ...]:
    """Returns what is special about a job, by names."""
    model, training, protection = scenario.job.model, scenario.job.training, scenario.job.protection
    named = {
        "tied": model.tied,
        "shared experts": bool(model.shared),
        "dense": not model.experts,
        "dense layers": model.every > 1,
        "uneven stages": bool(model.more_layers),
        "vocabulary >= 1000": model.vocabulary >= 1000,
        "small buckets": bool(training.bucket),
        "evaluation": bool(training.evaluate_every),
        "saves": bool(training.save_every),
        "saves beside": training.saves_beside,
        "no load": not training.loads,
        "W by what is measured": bool(protection.bandwidths),
        "no replica copy": not protection.copies_state,
        "no frozen skip": not protection.skips_frozen,
        "no upstream log": not protection.logs,
        "no adoption": not protection.adopts,
        "domains of two": protection.domain > 1,
        "tiers": bool(protection.tier_interval),
    }
    chosen = (
        training.precision,
        training.optimizer,
        training.experts,
        training.balance,
        training.dropout,
        training.z_loss,
        training.dispatcher,
        training.recompute,
        f"order by {protection.order}",
    )
    return (*chosen, *(name for name, holds in named.items() if holds))


def digest_of_sources() -> str:
    """Returns a digest of all that a run depends on; results of other sources don't count."""
    digest = hashlib.sha256()
    paths = [_ROOT / "pretrain_moe.py"]
    for folder in ("megatron_moevement", "patches", "tests/harness"):
        paths += [path for path in (_ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(path for path in paths if path.suffix != ".pyc"):
        digest.update(f"{path.relative_to(_ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
