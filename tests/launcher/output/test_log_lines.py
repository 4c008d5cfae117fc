"""What becomes of a stream of bytes in a log file, and that it can be read back from there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.output import log_lines
from launcher.output.log_lines import LogLines, remark, said, stamp

AT = "2026-03-01T09:30:00.123456Z"
_ENTRY = re.compile(rb"(\S+) (stdout|stderr) ([FP]) (.*)\n", re.DOTALL)


def through(*chunks: bytes) -> bytes:
    lines = LogLines("stdout")
    return b"".join([*(lines.feed(chunk, AT) for chunk in chunks), lines.finish(AT)])


def read_back(entries: bytes) -> bytes:
    """What the process has written, by the entries."""
    text = b""
    for line in entries.split(b"\n")[:-1]:
        match = _ENTRY.fullmatch(line + b"\n")
        assert match is not None, line
        text += match[4] + (b"\n" if match[3] == b"F" else b"")
    return text


@pytest.mark.parametrize(
    ("chunks", "contents"),
    [
        ([], b""),
        ([b"a\nb\n"], b"F a|F b"),
        ([b"a", b"b\nc"], b"F ab|P c"),
        ([b"\n\n"], b"F |F "),
        ([b"\xff\x00\x1b[1m\n"], b"F \xff\x00\x1b[1m"),
        ([b"a\r\nb\r\r\n"], b"F a\r|F b\r\r"),
        ([b"1%\r2%", b"\r3%\ndone\n"], b"F 3%|F done"),
        ([b"1%\r", b"2%\r"], b"P 2%\r"),
        ([b"1%\r", b"  \r"], b""),
        ([b"1%\r", b" \rEpoch 1\n"], b"F Epoch 1"),
    ],
)
def test_entries(chunks: list[bytes], contents: bytes) -> None:
    wanted = b"".join(AT.encode() + b" stdout " + content + b"\n" for content in contents.split(b"|") if content)
    assert through(*chunks) == wanted


@given(st.lists(st.binary(max_size=20).filter(lambda chunk: b"\r" not in chunk), max_size=20))
def test_every_byte_can_be_read_back(chunks: list[bytes]) -> None:
    assert read_back(through(*chunks)) == b"".join(chunks)


@given(st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\r\n", b" \r"]), max_size=20))
def test_it_does_not_matter_how_the_output_is_cut(chunks: list[bytes]) -> None:
    assert through(*chunks) == through(b"".join(chunks))


def test_a_long_line_is_several_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "LONGEST", 10)
    entries = through(b"x" * 8, b"y" * 8, b"z" * 8 + b"\rw\nnext\n")
    assert [entry[len(AT) + 8 :] for entry in entries.decode().split("\n")[:-1]] == [
        "P " + "x" * 8 + "y" * 8,
        "F " + "z" * 8 + "\rw",
        "F next",
    ]


def test_what_waits_for_its_end_can_be_written_before() -> None:
    lines = LogLines("stderr")
    assert (lines.feed(b"ready\nloading.", AT), lines.holds) == (f"{AT} stderr F ready\n".encode(), True)
    assert (lines.flush(AT), lines.holds) == (f"{AT} stderr P loading.\n".encode(), False)
    assert lines.flush(AT) == b""
    assert lines.feed(b".done\n", AT) == f"{AT} stderr F .done\n".encode()
    lines.feed(b"50%\r", AT)
    assert not lines.holds, "it will be rewritten"


def test_lines_of_launch_py_are_marked() -> None:
    assert (
        remark("exited with code 1\n(a hint)", AT) == f"{AT} stderr F launch.py: exited with code 1 (a hint)\n".encode()
    )
    assert said("Traceback:\n  \udcff", AT) == f"{AT} stderr F Traceback:\n{AT} stderr F   ".encode() + b"\xff\n"


def test_times_are_utc() -> None:
    assert stamp(0.25) == "1970-01-01T00:00:00.250000Z"
