# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one HTML file that needs nothing else, made from the files of `page/`."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import os
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError

_SCRIPTS = (
    *("base.js", "timeline.js", "interaction.js", "charts.js", "incidents.js", "sections.js"),
    "main.js",
)
"""In the order in which they need each other; together they are one script."""
_ESCAPED = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
"""What could end a script element, or a line of it; in JSON these lie within strings alone."""


def page_of(report: Mapping[str, Any]) -> str:
    """Returns the page of a report.

    What events hold is data of the page and never code: its policy lets run the one script alone
    whose hash it names, and refuses the network.
    """
    files = importlib.resources.files(__package__) / "page"
    script = "\n".join(files.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    style = files.joinpath("page.css").read_text("utf-8")
    name = ", ".join(report["runs"])
    return string.Template(files.joinpath("page.html").read_text("utf-8")).substitute(
        title=html.escape(f"Run {name}" if name else "Report of a run"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        document=json_in_html(report),
    )


def json_in_html(document: Any) -> str:
    """Returns a document as JSON that may stand in an element of a page, whatever it holds."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.translate(_ESCAPED)


def write_page(page: str, path: Path) -> None:
    """Writes a page: all of it or nothing, in place of a former one.

    Raises:
        UserError: the file can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"can't write {path}: {error.strerror}; give another --out") from error


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
