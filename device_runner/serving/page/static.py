"""The page's files, and the table of its texts.

preact.js is preact 10 with htm, preact/standalone.module.js of npm's package htm 3.1.1; their licences are
next to it. All other files are prge's own, and none is generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from starlette.responses import Response

from device_runner.serving.protocol import RequestError
from prge.errors import format_value

FOLDER = Path(__file__).with_name("files")
INDEX, TEXTS = "index.html", "texts.json"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


def page_file(name: str) -> Response:
    """Return one of the page's files as a response; raises RequestError if there is none."""
    if name not in _names():
        raise RequestError(404, f"the page has no file {format_value(name)}")
    path = FOLDER / name
    headers = {"Cache-Control": "no-cache"}
    return Response(path.read_bytes(), headers=headers, media_type=_TYPES[path.suffix])


def translator(language: str) -> Callable[[str], str]:
    """Return a function that translates English words of a chart into a language of the page."""
    table = _texts()
    if language == "en" or language not in table:
        return str
    translations = {text: table[language][name] for name, text in table["en"].items()}
    return lambda text: translations.get(text, text)


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    return frozenset(path.name for path in FOLDER.iterdir() if path.suffix in _TYPES)


@lru_cache(maxsize=1)
def _texts() -> dict[str, dict[str, str]]:
    """Return the texts by language and name."""
    table: dict[str, dict[str, str]] = json.loads((FOLDER / TEXTS).read_text(encoding="utf-8"))
    return table
