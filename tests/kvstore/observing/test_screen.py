from __future__ import annotations

import io

from kvstore.observing.columns import TextLine
from kvstore.observing.command import StatusScreen, printable

LINES = [TextLine("head", "title"), TextLine("all is well"), TextLine("", "bad")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_there_is_no_terminal_lines_are_plain_and_one_below_the_other() -> None:
    out = io.StringIO()
    with StatusScreen(out, in_place=True, env={}) as screen:
        screen.show(LINES)
        screen.show([TextLine("again")])
    assert out.getvalue() == "head\nall is well\n\n\nagain\n"


def test_colors_are_for_terminals_that_want_them() -> None:
    texts = []
    for env in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
        out = Terminal()
        StatusScreen(out, env=env).show(LINES[:1])
        texts.append(out.getvalue())
    assert texts == ["\x1b[1mhead\x1b[0m\n", "head\n", "head\n"]


def test_what_is_watched_is_rewritten_in_place_and_the_terminal_is_left_as_it_was() -> None:
    out = Terminal()
    with StatusScreen(out, in_place=True, env={"NO_COLOR": "1"}) as screen:
        screen.show(LINES[:1])
        screen.show([TextLine("x" * 1000)] * 500)
    first, _, second = out.getvalue().partition("\x1b[H")[2].partition("\x1b[H")
    assert first == "head\x1b[K\x1b[J"
    assert len(second.split("\n")) < 500, "what does not fit is cut"
    assert max(len(line.partition("\x1b")[0]) for line in second.split("\n")) < 1000
    assert out.getvalue().startswith("\x1b[?1049h")
    assert out.getvalue().endswith("\x1b[?1049l")


def test_what_a_terminal_would_obey_is_not_written() -> None:
    assert printable("key '\x1b[2J\x07\u202e' · ok") == "key '?[2J??' · ok"
