"""The files of the page, which the package has beside this module. They are read once."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).with_name("page")
NAMES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/links.js": ("links.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot.js": ("uplot/uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot/uplot.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True)
class PageFile:
    """A file, as it is and in fewer bytes, and what it is."""

    plain: bytes = field(repr=False)
    small: bytes = field(repr=False)
    content_type: str


def load() -> dict[str, PageFile]:
    """Return the files by their addresses."""
    files = {}
    for address, (name, content_type) in NAMES.items():
        plain = (FOLDER / name).read_bytes()
        files[address] = PageFile(plain, gzip.compress(plain, 9, mtime=0), content_type)
    return files
