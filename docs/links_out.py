# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: a link to a file of the repository outside of `docs/` is text on the site.

Where the repository is browsed it leads to the file; the site has the pages alone.
"""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^):#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the text of a page in which links that leave `docs/` are what they show."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        leads_to = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if leads_to.startswith("../") else link[0]

    return _LINK.sub(shown, markdown)
