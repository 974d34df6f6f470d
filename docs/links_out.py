# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: a link to a file of the repository that is no page is text on the site.

Where the repository is browsed it leads to the file; the site has the pages alone.
"""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^):#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the text of a page in which links to no page are what they show."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        leads_to = posixpath.normpath(posixpath.join(folder, link[2]))
        is_page = not leads_to.startswith("../") and not leads_to.endswith(".py")
        return link[0] if is_page else link[1]

    return _LINK.sub(shown, markdown)
