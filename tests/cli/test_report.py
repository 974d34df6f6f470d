# SPDX-License-Identifier: Apache-2.0
"""`moevement report` makes one page of a run that needs nothing else."""

import base64
import hashlib
import html.parser
import json
import re

import pytest

from megatron_moevement.cli import main
from megatron_moevement.cli.report_page import json_in_html
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report import holders
from megatron_moevement.runtime.observation.events import EventLog, EventName
from tests.harness import browser
from tests.harness.synthetic_run import Shape, SyntheticRun

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;\u2028 'x' \"y\""


class Elements(html.parser.HTMLParser):
    """Collects elements with their attributes, and the text in each script and style."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self._is_open = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._is_open = tag in {"script", "style"}
        if self._is_open:
            self.texts.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self._is_open = False

    def handle_data(self, data):
        if self._is_open:
            self.texts[-1][2] += data


HEADINGS = (
    *("Outages", "Timeline", "Where the time went", "Training", "Windows, slots and holders"),
    *("Host memory and bandwidth", "Experts"),
)
DRAWN = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))"
"""Waits until what was asked of the page is drawn."""


@pytest.fixture
def run_dir(tmp_path):
    shape = Shape(layout=Layout(pp=2, dp=2), spares=2, steps=40, faults=2)
    SyntheticRun(shape).write(tmp_path / "events")
    return tmp_path / "events"


def made(run_dir, *flags):
    assert main(["report", str(run_dir), *flags]) == ExitCode.DONE
    return (run_dir / "report.html").read_text("utf-8")


def data_of(page):
    return json.loads(re.search(r'id="document">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_lies_beside_the_events_and_a_line_names_the_newest_loss(run_dir, capsys):
    page = made(run_dir)
    printed = capsys.readouterr().out
    document = data_of(page)
    assert f"{run_dir}/report.html: 2 outages" in printed
    assert document["incidents"][-1]["summary"] in printed
    assert made(run_dir) == page  # and it replaces a former one


def test_json_is_what_the_page_shows(run_dir, capsys):
    assert main(["report", str(run_dir), "--json"]) == ExitCode.DONE
    assert not (run_dir / "report.html").exists()
    assert json.loads(capsys.readouterr().out) == data_of(made(run_dir))


def test_the_page_refers_to_nothing_else(run_dir):
    elements = Elements(made(run_dir))
    assert not [each for each in elements.found if {"src", "href", "srcset"} & each[1].keys()]
    assert not {tag for tag, _ in elements.found} & {"link", "img", "iframe", "object", "embed"}
    style = next(text for tag, _, text in elements.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_its_policy_allows_its_own_script_and_style_alone(run_dir):
    elements = Elements(made(run_dir))
    (policy,) = [a["content"] for tag, a in elements.found if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; ")
    for tag, attributes, text in elements.texts:
        if attributes.get("type") == "application/json":
            continue
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_what_events_hold_stays_data(tmp_path):
    with EventLog(tmp_path / "events", 0, 0) as events:
        events.emit(EventName.PROCESS_START, 0, run_id=HOSTILE)
        events.emit(EventName.CHECKPOINT_FAILED, 3, duration_s=1.0, reason=HOSTILE)
        events.emit(EventName.ITERATION, 4, duration_s=1.0, loss=2.0)
    page = made(tmp_path / "events")
    elements = Elements(page)
    assert [tag for tag, _, _ in elements.texts] == ["style", "script", "script"]
    document = data_of(page)
    assert document["runs"] == [HOSTILE]
    assert document["notes"][0]["reason"] == HOSTILE


def test_no_text_ends_a_script():
    text = json_in_html({"a": HOSTILE})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": HOSTILE}


def test_bad_folders_are_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.jsonl").write_text('{"time": "soon"}\n')
    for name in ("none", "empty", "damaged"):
        assert main(["report", str(tmp_path / name)]) == ExitCode.BAD_ARGUMENTS
        assert str(tmp_path / name) in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused(run_dir, tmp_path, capsys):
    out = tmp_path / "none" / "page.html"
    assert main(["report", str(run_dir), "--out", str(out)]) == ExitCode.BAD_ARGUMENTS
    assert "--out" in capsys.readouterr().err


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed")
def test_of_many_ranks_the_page_has_sums_of_holders_and_where_the_rest_is(run_dir, monkeypatch):
    monkeypatch.setattr(holders, "DRAWN", 3)
    made(run_dir)
    with browser.opened(browser.installed()) as tab:
        tab.open(run_dir / "report.html")
        assert tab.complaints == []
        shown = tab.run("document.getElementById('protection').textContent")
    assert "Holders of copies (" in shown
    assert "only sums are here" in shown


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed")
def test_a_run_without_popularity_has_what_to_set_for_it(tmp_path):
    with EventLog(tmp_path / "events", 0, 0) as events:
        events.emit(EventName.PROCESS_START, 0)
        events.emit(EventName.ITERATION, 4, duration_s=1.0, loss=2.0)
    made(tmp_path / "events")
    with browser.opened(browser.installed()) as tab:
        tab.open(tmp_path / "events" / "report.html")
        assert tab.complaints == []
        shown = tab.run("document.getElementById('experts').textContent")
    assert "--moevement-order hard, soft, decayed or capacity" in shown


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_a_complaint(run_dir, width, scheme):
    made(run_dir)
    with browser.opened(browser.installed()) as tab:
        tab.look(width, 900, scheme=scheme)
        tab.open(run_dir / "report.html")
        assert tab.complaints == []
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("document.documentElement.classList.contains('dark')") is (scheme == "dark")
        document = data_of((run_dir / "report.html").read_text("utf-8"))
        shown = tab.run("document.body.innerText")
        lost = [incident["casualties"][0] for incident in document["incidents"]]
        assert lost
        assert all(f"rank {one['rank']} on {one['host']} {one['end']}" in shown for one in lost)
        for text in HEADINGS:
            assert text in shown
        tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
        tab.run("for (const one of document.querySelectorAll('.recoveries tbody tr')) one.click()")
        tab.run(DRAWN)
        assert tab.complaints == []
        assert tab.run("document.querySelectorAll('details table').length") >= 5
        replayed = document["incidents"][-1]["recovery"]["scope"]
        assert replayed
        assert tab.run("document.querySelectorAll('.stage.scope').length") == len(replayed)


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed")
def test_the_timeline_shows_less_time_where_that_is_asked_for_and_all_again(run_dir):
    made(run_dir)
    with browser.opened(browser.installed()) as tab:
        tab.look(1280, 900, scheme="light")
        tab.open(run_dir / "report.html")
        shown = "document.querySelector('#timeline .tools').textContent"
        canvas = "document.querySelector('#timeline .rows canvas')"
        picture = f"{canvas}.toDataURL()"
        whole, before = tab.run(shown), tab.run(picture)
        tab.run(f"{canvas}.dispatchEvent(new KeyboardEvent('keydown', {{key: '+'}}))")
        tab.run(DRAWN)
        assert tab.run(shown) != whole
        assert tab.run(picture) != before
        tab.run("document.querySelector('[title=\"Show the whole run\"]').click()")
        tab.run(DRAWN)
        assert (tab.run(shown), tab.run(picture)) == (whole, before)
