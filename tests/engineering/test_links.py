# SPDX-License-Identifier: Apache-2.0
"""Links between pages lead somewhere, and what names a page names one that is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """Returns the relative links of a page whose file or heading does not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page):
    assert broken_links(page) == []


def test_a_link_to_nothing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](#one-heading) [b](#other) [c](page.md) [d](gone.md)\n")
    assert broken_links(page) == ["#other", "gone.md"]


@pytest.mark.parametrize(
    "names",
    [
        r"docs/[a-z_/]+\.(md|svg|json)",
        r"\b(tests|scripts|benchmarks)/[a-z_/]+\.(py|sh|sbatch|json)\b",
    ],
    ids=["pages", "scripts and tests"],
)
def test_sources_name_files_that_exist(names):
    # `git grep` exits with 1 where nothing matches, which would be a wrong pattern.
    found = subprocess.run(
        ["git", "grep", "-IhoE", names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {name for name in found.stdout.split() if not (ROOT / name).exists()} == set()


def test_pages_name_files_that_exist():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = set(re.findall(r"\b(?:tests|scripts|benchmarks)/[a-z_/]+\.[a-z]+", pages))
    assert {name for name in names if not (ROOT / name).exists()} == set()


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
