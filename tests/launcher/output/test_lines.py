from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import lines
from launcher.output import lines as output
from launcher.output.lines import Prefixer, StatusPrefixer, prefix

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


P = b"[x] "
TQDM = [b"\r 0%|   |", b"\r50%|#  |", b"\r100%|###|", b"\n"]


def after(*chunks: bytes) -> tuple[bytes, bytes, bytes]:
    """The lines so far, the status, and the lines at the end."""
    lines = StatusPrefixer(P)
    whole = b"".join(map(lines.feed, chunks))
    status, last = lines.status, lines.finish()
    assert lines.status == b""
    return whole, status, last


@pytest.mark.parametrize(
    ("chunks", "result"),
    [
        ([], (b"", b"", b"")),
        ([b"a\nb"], (b"[x] a\n", b"", b"[x] b\n")),
        ([b"a\r\nb\r", b"\n", b"\n"], (b"[x] a\n[x] b\n[x] \n", b"", b"")),
        ([b"1%\r"], (b"", b"[x] 1%", b"[x] 1%\n")),
        ([b"1%\r", b"2", b"%\r"], (b"", b"[x] 2%", b"[x] 2%\n")),
        ([b"1%\rdone\n"], (b"[x] done\n", b"", b"")),
        ([b"1%\r   \r"], (b"", b"", b"")),
        (TQDM[:3], (b"", b"[x] 50%|#  |", b"[x] 100%|###|\n")),
        (TQDM, (b"[x] 100%|###|\n", b"", b"")),
    ],
)
def test_lines_and_statuses(chunks: list[bytes], result: tuple[bytes, bytes, bytes]) -> None:
    assert after(*chunks) == result


OUTPUT = st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\r\n", b" \r"]), max_size=20)


@given(OUTPUT)
def test_it_does_not_matter_how_output_with_a_status_is_cut(chunks: list[bytes]) -> None:
    assert after(*chunks) == after(b"".join(chunks))


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and b"\r" not in line)))
def test_no_line_is_lost(lines: list[bytes]) -> None:
    whole = b"".join(P + line + b"\n" for line in lines)
    assert after(b"".join(line + b"\n" for line in lines)) == (whole, b"", b"")


def test_a_status_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 10)
    assert after(b"a" * 6, b"a" * 6, b"b\n") == (P + b"a" * 12 + b"\n" + P + b"b\n", b"", b"")
