from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.calls.streams import Streams


class Flaky(io.StringIO):
    def write(self, _text: str) -> int:
        raise RuntimeError("the kernel has gone")


def replace(monkeypatch: pytest.MonkeyPatch, stdout: Any = None) -> tuple[Any, io.StringIO]:
    """Put streams in the place of standard output and error. Not a fixture: pytest does so too, before each test."""
    streams = io.StringIO() if stdout is None else stdout, io.StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    return streams


def test_a_stream_that_has_been_put_in_place_is_written_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = replace(monkeypatch)
    outlet = Streams()
    outlet.put(outlet.stdout, b"[worker 0] one\n")
    outlet.put(outlet.stderr, b"[worker 0] \xff\n")
    outlet.put(outlet.stdout, b"")
    assert [stream.getvalue() for stream in replaced] == ["[worker 0] one\n", "[worker 0] \ufffd\n"]
    assert (outlet.pending, outlet.waits_for, outlet.broken) == (0, None, {})
    outlet.pump()


def test_one_that_fails_is_broken_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stderr = replace(monkeypatch, Flaky())
    outlet = Streams()
    outlet.put(outlet.stdout, b"lost\n")
    outlet.put(outlet.stdout, b"lost too\n")
    outlet.put(outlet.stderr, b"kept\n")
    assert list(outlet.broken) == [outlet.stdout]
    assert "the kernel has gone" in str(outlet.broken[outlet.stdout])
    assert stderr.getvalue() == "kept\n"


def test_a_flush_that_fails_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    stream.flush = lambda: (_ for _ in ()).throw(OSError(5, "gone"))
    monkeypatch.setattr(sys, "stdout", stream)
    outlet = Streams()
    outlet.put(outlet.stdout, b"x\n")
    outlet.pump()
    assert list(outlet.broken) == [outlet.stdout]


def test_no_stream_at_all_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    outlet = Streams()
    outlet.put(outlet.stdout, b"x\n")
    outlet.pump()
    assert outlet.broken == {}


def test_the_callers_own_lines_come_first_where_both_go_to_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "__stdout__", file)
        print("the caller's")
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            outlet = Streams()
            assert outlet.stdout == 1
            outlet.put(1, b"the job's\n")
            outlet.pump()
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert (tmp_path / "out").read_text() == "the caller's\nthe job's\n"
