"""The files of the page."""

from __future__ import annotations

import re

from servers.observer import web

MOST_BYTES = 60_000  # of all that a browser fetches, as it is sent


def test_the_page_is_small() -> None:
    assert sum(len(file.small) for file in web.page_files().values()) <= MOST_BYTES


def test_every_file_is_served() -> None:
    served = {name for name, _ in web.NAMES.values()}
    there = {str(path.relative_to(web.FOLDER)) for path in web.FOLDER.rglob("*.*")}
    assert served == there


def test_the_page_has_nothing_from_elsewhere() -> None:
    known = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    for address, file in web.page_files().items():
        found = set(re.findall(r"https?://[^\s\"')]+", file.plain.decode()))
        assert found <= known, address


def test_nothing_is_written_as_markup() -> None:
    for address, file in web.page_files().items():
        text = file.plain.decode()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, address
    page = web.page_files()["/"].plain.decode()
    assert " style=" not in page
    assert not re.search(r"<script(?![^>]* src=)|<style| on[a-z]+=", page)
