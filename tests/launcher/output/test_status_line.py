"""Which status is drawn, and when."""

from __future__ import annotations

from launcher.output.status_line import ERASE, StatusLine

DRAWN = b"\x1b[?7l%b\x1b[0m\x1b[?7h"


def test_it_is_drawn_when_it_has_changed() -> None:
    line = StatusLine()
    assert line.draw() == b""
    line.set("a", b"1%")
    assert line.draw() == DRAWN % b"1%"
    assert line.draw() == b""
    line.set("a", b"2%")
    assert line.draw() == ERASE + DRAWN % b"2%"
    line.set("a", b"")
    assert line.draw() == ERASE
    assert line.draw() == b""


def test_it_is_erased_before_other_lines_and_drawn_again_after_them() -> None:
    line = StatusLine()
    assert line.make_room() == b""
    line.set("a", b"1%")
    line.draw()
    assert [line.make_room(), line.make_room(), line.draw()] == [ERASE, b"", DRAWN % b"1%"]


def test_of_several_the_first_is_shown_until_it_ends() -> None:
    line = StatusLine()
    line.set("a", b"a1")
    line.set("b", b"b1")
    line.draw()
    line.set("b", b"b2")
    assert line.draw() == b""
    line.set("a", b"")
    assert line.draw() == ERASE + DRAWN % b"b2"


def test_colors_stay_and_movements_go() -> None:
    line = StatusLine()
    line.set("a", b"\x1b[2K\x1b[1;31mred\x1b[0m\x1b[A\x1b[?25l")
    assert line.draw() == DRAWN % b"\x1b[1;31mred\x1b[0m"


def test_several_lines_are_erased_together() -> None:
    line = StatusLine()
    line.set("a", b"1\n2\n3")
    assert line.draw() == DRAWN % b"1\n2\n3"
    line.set("a", b"4")
    assert line.draw() == b"\r\x1b[2A\x1b[J" + DRAWN % b"4"
    assert line.make_room() == ERASE
