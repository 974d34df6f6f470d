# SPDX-License-Identifier: Apache-2.0
"""`moevement events`: what is recorded, for people and for programs."""

import json

from megatron_moevement.cli import main
from megatron_moevement.policy.accounting.event import EventName


def test_every_event_and_its_fields_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["events"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {name.value for name in EventName} <= {
        line.split("│")[1].strip() for line in lines if "│" in line
    }
    assert sum("to do: " in line for line in lines) == len(EventName)
    assert any("verdict" in line and "of its plan" in line for line in lines)


def test_programs_find_the_common_fields_with_each_event(capsys):
    assert main(["events", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == [name.value for name in EventName]
    assert all({"time", "pid", "iteration"} <= set(kind["fields"]) for kind in document.values())
    assert document["spare"]["recorder"] == "a process without a rank"
    assert document["checkpoint_failed"]["action"].startswith("see to room and rights of --save")
