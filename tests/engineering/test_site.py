# SPDX-License-Identifier: Apache-2.0
"""The site of the pages is built without a warning, and loads nothing from the network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"' >]+"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"' >]+"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+"
)


def built(config, site):
    """Builds the site of a configuration, and returns the finished command."""
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "-f", config, "-d", site]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = built(ROOT / "mkdocs.yml", folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def copied(tmp_path):
    """Returns a copy of the pages, to be broken."""
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_every_page_is_there(site):
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    names = {page.with_stem("index") if page.stem == "README" else page for page in pages}
    assert {str(name) for name in names if not (site / name.with_suffix(".html")).exists()} == set()


def test_no_page_loads_anything_from_the_network(site):
    files = [path for path in site.rglob("*") if path.suffix in {".css", ".html", ".svg"}]
    found = {path.name: LOADED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: addresses for name, addresses in found.items() if addresses} == {}


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://example.org/a.js">',
        "<link rel=stylesheet href=//example.org/a.css>",
        "@import 'https://example.org/a.css'",
        "src:url(https://example.org/a.woff)",
    ],
)
def test_what_would_be_loaded_is_found(text):
    assert LOADED.search(text)


def test_no_link_is_dead(site):
    dead = set()
    for page in site.rglob("*.html"):
        for link in re.findall(
            r"<(?:a|img)\b[^>]*\b(?:href|src)=\"?([^\" >#]+)", page.read_text("utf-8")
        ):
            if ":" not in link and not (page.parent / link).exists() and page.name != "404.html":
                dead.add((page.name, link))
    assert dead == set()


def test_a_link_that_leaves_the_pages_is_text(site):
    page = (site / "use" / "install.html").read_text(encoding="utf-8")
    assert "<code>constraints.txt</code>" in page
    assert "../../constraints.txt" not in page


def test_a_pipe_in_a_table_is_one(site):
    page = (site / "use" / "flags.html").read_text(encoding="utf-8")
    assert "<code>DIR|URL</code>" in page
    assert r"\|" not in page


def test_what_leads_nowhere_or_is_not_reached_fails(copied):
    docs = copied / "docs"
    with (docs / "glossary.md").open("a") as glossary:
        glossary.write("\n[one](gone.md) and [another](README.md#gone)\n")
    (docs / "use" / "left_out.md").write_text("# A page that the navigation lacks\n")
    result = built(copied / "mkdocs.yml", copied / "site")
    assert result.returncode == 1
    assert {"gone.md", "#gone", "left_out.md"} <= set(re.findall(r"[\w#]*\.?\w+", result.stderr))
