# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP, their page, their rules and their dashboard; a real Prometheus reads them."""

import contextlib
import ctypes
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from megatron_moevement.cli import main
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.outcome.metrics import Kind, Metric
from megatron_moevement.policy.outcome.standing import Standing
from megatron_moevement.runtime.observation.event_tail import EventTail
from megatron_moevement.runtime.observation.events import EventLog, EventName, read_events
from megatron_moevement.runtime.observation.metrics_server import PREFIX, MetricsServer
from tests.harness.synthetic_run import Shape, SyntheticRun

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "scripts" / "moevement-rules.yml"
DASHBOARD = json.loads((ROOT / "scripts" / "moevement-dashboard.json").read_text())
PAGE = (ROOT / "docs" / "operate" / "metrics.md").read_text()
ANY_PORT = ("127.0.0.1", 0)
PR_GET_CHILD_SUBREAPER = 37


def name_of(metric):
    return f"{PREFIX}{metric.value.name}{'_total' if metric.value.kind is Kind.COUNTER else ''}"


NAMES = {name_of(metric) for metric in Metric}


def record(folder):
    """Writes events from which every metric has a figure."""
    with EventLog(folder, 0, 0) as events:
        events.emit(EventName.LAUNCHED, 0, launch="a", started_s=time.time() - 100)
        events.emit(EventName.PHASE, 0, phase="training")
        edge = {"start": 0, "size": 4, "lag": 1, "copies": 2}
        events.emit(EventName.WINDOW_PERSISTED, 4, **edge)
        events.emit(EventName.PROTECTION, 4, level="full", wanted=2, spares=1, costs=[], **edge)
        events.emit(EventName.CHECKPOINT_SAVED, 4, duration_s=1.0)
        events.emit(
            EventName.RECOVERED, 4, verdict="LOCALIZED", scope=[1], guarantee="EXACT",
            replayed_steps=0, replay_proof=None, owed_copies=0, moved_copies=0,
            breakdown_s={"detect": 0.5, "wait": 1.0},
        )  # fmt: skip
        at = {"began_s": time.time() - 1, "ended_s": time.time(), "duration_s": 1.0}
        events.emit(
            EventName.ITERATION, 5, steps=1, **at, stall_s=0.1, loss=2.5, host_bytes=100,
            captured_bytes=10, copy_s=0.5, replicated_bytes=10, send_s={"1": 0.5},
        )  # fmt: skip


@pytest.fixture
def served(tmp_path):
    """Serves metrics of a folder of events."""
    with MetricsServer(ANY_PORT, tmp_path / "events") as server:
        server.serve()
        yield server, tmp_path / "events"


def fetched(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=10) as answer:
        return answer.read().decode()


def samples(text):
    """Returns the samples of an answer."""
    found = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in found}


def test_each_metric_is_served_with_its_kind_and_its_meaning(served):
    server, folder = served
    assert samples(fetched(server.address)) == {}
    record(folder)
    text = fetched(server.address)
    for metric in Metric:
        name = name_of(metric)
        assert f"# HELP {name} {metric.value.meaning}\n" in text
        assert f"# TYPE {name} {metric.value.kind.value}\n" in text
    found = samples(text)
    assert {re.sub(r"\{.*", "", name) for name in found} == NAMES
    assert found['moevement_recovery_seconds{part="wait"}'] == 1.0
    assert found["moevement_committed_step"] == 5
    with EventLog(folder, 0, 0) as events:
        events.emit(EventName.ITERATION, 6, loss=2.0)
    assert samples(fetched(server.address))["moevement_committed_step"] == 6


def test_a_damaged_event_costs_its_own_figures_alone(served):
    server, folder = served
    record(folder)
    before = samples(fetched(server.address))
    with EventLog(folder, 0, 0) as events:
        events.emit(EventName.WINDOW_PERSISTED, 9, start=0, size="many", lag=1, copies=1)
        events.emit(EventName.WINDOW_PERSISTED, 9, start=0, size=4, lag="long", copies=1)
        told = {"level": "full", "copies": 2, "wanted": 2, "spares": "some"}
        events.emit(EventName.PROTECTION, 9, **told)
        events.emit(EventName.RECOVERED, 9, verdict="UNHEARD-OF")
        events.emit(EventName.ITERATION, 9)
    found = samples(fetched(server.address))
    assert found["moevement_committed_step"] == 9
    lacking = before.keys() - found.keys()  # the last step had no copies
    assert lacking <= {"moevement_spares", *(name for name in before if "bytes_per" in name)}
    assert found["moevement_window_steps"] == before["moevement_window_steps"]


def test_the_figures_are_those_of_all_events_though_not_all_of_them_are_read(tmp_path):
    run = SyntheticRun(Shape(layout=Layout(pp=2, dp=2), spares=2, steps=60, faults=4, seed=5))
    run.write(tmp_path / "events")
    few, all_of_them = Standing(), Standing()
    news = [record for _, record in EventTail(tmp_path / "events").news()]
    events = read_events(tmp_path / "events")
    assert len(news) < len(events)
    for standing, records in ((few, news), (all_of_them, events)):
        for one in records:
            standing.take(one)
    now_s = events[-1].time + 1
    assert list(few.figures(now_s)) == list(all_of_them.figures(now_s))


def test_it_listens_at_its_address_alone_and_only_while_it_is_open(served):
    server, folder = served
    port = server.address[1]
    with pytest.raises(UserError, match=f"--metrics-address 127.0.0.1:{port}: can't listen"):
        MetricsServer(("127.0.0.1", port), folder)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    "address", ["9464", ":9464", "localhost", "localhost:x", "localhost:65536"]
)
@pytest.mark.parametrize("command", [("stores",), ("launch", "-n", "1")])
def test_an_address_that_is_none_is_refused(command, address, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--metrics-address", address])
    assert ended.value.code == ExitCode.BAD_ARGUMENTS
    assert "is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("stores",), ("launch", "-n", "1")])
def test_metrics_without_events_are_refused(command, capsys):
    assert main([*command, "--metrics-address", "127.0.0.1:0"]) == ExitCode.BAD_ARGUMENTS
    assert "give the job --moevement-event-dir" in capsys.readouterr().err
    is_reaper = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_reaper))
    assert is_reaper.value == 0


def test_who_hosts_the_stores_serves_them(tmp_path):
    record(tmp_path / "events")
    command = [
        sys.executable,
        "-m",
        "megatron_moevement.cli",
        "stores",
        "--event-dir",
        tmp_path / "events",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--metrics-address", "127.0.0.1:0"], **pipes) as process:
        try:
            assert process.stdout.readline().startswith("MASTER_ADDR=")
            line = process.stderr.readline()
            port = int(re.search(r"served at http://127\.0\.0\.1:(\d+)/metrics", line)[1])
            assert samples(fetched(("127.0.0.1", port)))["moevement_committed_step"] == 5
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_the_page_has_a_row_for_each_metric():
    rows = re.findall(
        r"^\| `(moevement_\w+)(?:\{(\w+)\})?` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE
    )
    assert rows == [
        (name_of(metric), metric.value.label or "", metric.value.kind.value, metric.value.meaning)
        for metric in Metric
    ]


def names_in(text):
    return set(re.findall(r"\bmoevement_\w+", text))


def expressions():
    """Returns what the dashboard asks for, of all jobs."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [target["expr"].replace("$instance", ".+") for target in targets]


def test_rules_and_dashboard_name_metrics_that_are_served():
    assert names_in(RULES.read_text()) <= NAMES
    assert names_in(json.dumps(DASHBOARD)) == NAMES
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed: apt-get install prometheus",
)


@needs_prometheus
def test_every_rule_is_one_and_fires_when_it_should():
    for command in (
        ["check", "rules", RULES],
        ["test", "rules", ROOT / "tests/cli/rules_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rules = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    tested = set(re.findall(r"MoEvement\w+", (ROOT / "tests/cli/rules_test.yml").read_text()))
    assert tested == rules


CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: moevement
    static_configs: [{{targets: ["{host}:{port}"]}}]
"""


@contextlib.contextmanager
def prometheus(folder, address):
    """Runs Prometheus; yields what asks it."""
    with socket.create_server(ANY_PORT) as free:
        own = free.getsockname()
    file = folder / "prometheus.yml"
    file.write_text(CONFIGURATION.format(rules=RULES, host=address[0], port=address[1]))
    command = [
        *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address={own[0]}:{own[1]}",
    ]

    def ask(path):
        return json.loads(fetched(own, f"/api/v1/{path}"))["data"]

    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield ask
        finally:
            process.terminate()


@needs_prometheus
def test_a_prometheus_reads_all_metrics_and_evaluates_the_rules_and_the_dashboard(served, tmp_path):
    server, folder = served
    record(folder)
    with prometheus(tmp_path, server.address) as ask:

        def found(expression):
            with contextlib.suppress(OSError):
                return ask(f"query?query={quote(expression)}")["result"]
            return []

        while not found('up{job="moevement"} == 1 and on() moevement_committed_step'):
            time.sleep(0.1)
        lacking = [one for one in expressions() if not found(one)]
        assert lacking == []
        named = {one["metric"]["__name__"] for one in found('{__name__=~"moevement_.+"}')}
        assert named == NAMES
        (group,) = ask("rules")["groups"]
        while not all(rule["health"] == "ok" for rule in group["rules"]):
            assert not any(rule["health"] == "err" for rule in group["rules"])
            time.sleep(0.1)
            (group,) = ask("rules")["groups"]
