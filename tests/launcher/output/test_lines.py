from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines as output
from launcher.output.lines import Prefixer, prefix

P = b"[x] "


def through(*chunks: bytes) -> bytes:
    lines = Prefixer(P)
    return b"".join([*(lines.feed(chunk) for chunk in chunks), lines.finish()])


@pytest.mark.parametrize(
    ("chunks", "result"),
    [
        ([], b""),
        ([b"a\nb\n"], b"[x] a\n[x] b\n"),
        ([b"a", b"b\nc"], b"[x] ab\n[x] c\n"),
        ([b"\n\n"], b"[x] \n[x] \n"),
        ([b"\xff\x00\n"], b"[x] \xff\x00\n"),
        ([b"a\r\nb\r\n"], b"[x] a\n[x] b\n"),
        ([b"a\r", b"\nb\n"], b"[x] a\n[x] b\n"),
        ([b"a\r\r\n", b"\n"], b"[x] a\n[x] \n"),
        ([b"\r\n\r\n"], b"[x] \n[x] \n"),
        ([b"\r1%\r2%", b"\r3%\ndone\n"], b"[x] 1%\n[x] 2%\n[x] 3%\n[x] done\n"),
        ([b"1%\r"], b"[x] 1%\n"),
    ],
)
def test_whole_lines_come_out(chunks: list[bytes], result: bytes) -> None:
    assert through(*chunks) == result


LINES = st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\r\n"]), max_size=20)


@given(LINES)
def test_it_does_not_matter_how_the_output_is_cut(chunks: list[bytes]) -> None:
    assert through(*chunks) == through(b"".join(chunks))


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and b"\r" not in line)))
def test_nothing_is_lost(lines: list[bytes]) -> None:
    assert through(b"".join(line + b"\n" for line in lines)) == b"".join(P + line + b"\n" for line in lines)


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE", 10)
    lines = Prefixer(P)
    assert lines.feed(b"x" * 10) == b""
    assert lines.feed(b"y") == P + b"x" * 10 + b"y\n"
    assert lines.feed(b"z\n") == P + b"z\n"


def test_prefixes() -> None:
    assert prefix("worker 0", 3, color=False) == b"[worker 0] "
    assert prefix("worker 0", 0, color=True) == b"\x1b[0;36m[worker 0]\x1b[0m "
    assert len({prefix("x", index, color=True) for index in range(20)}) == 10
