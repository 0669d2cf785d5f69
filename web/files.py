"""The page's files and the chart library's bundle, read once: no path of a request ever reaches the file system."""

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ETag, web

from web.answers import Refused

STATIC = Path(__file__).parent / "static"
TYPES: Mapping[str, str] = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
BINARY = frozenset({".png", ".woff2"})
PLOTLY = "plotly.min.js"


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    tag: ETag


class Files:
    """`web/static` by name, and `plotly.min.js` out of the installed plotly, read when it is first asked for."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in STATIC.iterdir() if path.suffix in TYPES}

    def answer(self, request: web.Request, name: str, status: int = 200) -> web.Response:
        """The file, or 304 where the browser has it already. Raises Refused (404)."""
        if name == PLOTLY and name not in self._files:
            self._files[name] = _read(_plotly())
        file = self._files.get(name)
        if file is None:
            raise Refused(404, f"no file {name[:80]!r}", "open /")
        # kept by the browser, which asks each time whether it is still the one: an upgrade must not mix versions
        headers = {"Cache-Control": "no-cache", "ETag": f'"{file.tag.value}"'}
        if status == 200 and any(tag.value in (file.tag.value, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        suffix = Path(name).suffix
        charset = None if suffix in BINARY else "utf-8"
        return web.Response(
            body=file.content, status=status, content_type=TYPES[suffix], charset=charset, headers=headers
        )


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, ETag(hashlib.sha256(content).hexdigest()[:32]))


def _plotly() -> Path:
    """Where plotly's wheel keeps its bundle; found without importing plotly, which takes a second. Raises Refused."""
    found = importlib.util.find_spec("plotly")
    path = None if found is None or found.origin is None else Path(found.origin).parent / "package_data" / PLOTLY
    if path is None or not path.is_file():
        raise Refused(404, "the Python package plotly, which draws the charts, is not installed", "install Shoal again")
    return path
