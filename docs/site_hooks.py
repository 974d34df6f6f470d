# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages are on the site as where the repository is browsed.

There a link to a file of the repository leads to the file; the site has the pages alone, and the
link is text. And a pipe in a cell of a table, which needs a backslash, is shown without it.
"""

import posixpath
import re
from typing import Any

_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^):#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the text of a page in which links to no page are what they show."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        leads_to = posixpath.normpath(posixpath.join(folder, link[2]))
        is_page = not leads_to.startswith("../") and not leads_to.endswith(".py")
        return link[0] if is_page else link[1]

    return _LINK.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Returns the page without the backslashes of pipes in tables."""
    return _CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)
