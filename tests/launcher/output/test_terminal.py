from __future__ import annotations

import os
import pty

import pytest
import screen

from launcher.output.terminal import columns, wants_color


@pytest.mark.parametrize(
    ("environ", "wanted"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colors_are_for_terminals_and_those_who_want_them(environ: dict[str, str], wanted: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        assert wants_color(theirs, environ) is wanted
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_width_of_a_terminal() -> None:
    pipe = os.pipe()
    with screen.terminal() as (_, theirs):
        assert columns(theirs, {}) == screen.COLUMNS
        assert columns(theirs, {"TERM": "dumb"}) == 0
    ours, theirs = pty.openpty()  # has no width
    assert columns(theirs, {}) == 80
    os.close(ours)
    os.close(theirs)
    assert columns(pipe[1], {}) == columns(-1, {}) == 0
    for fd in pipe:
        os.close(fd)
