"""Where a progress bar is drawn, that log lines stay above it, and lines where there is none."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import screen
from callback_runs import Run, param

from workers.callbacks import BatchEndParam, ProgressBar, progress


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The root logger as in a program that has called basicConfig."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(sys.stderr)])
    level = root.level
    root.setLevel(logging.INFO)
    yield root
    root.setLevel(level)


def bar(root: logging.Logger) -> None:
    shown = ProgressBar(length=20)
    shown.begin(Run(num_batches=3))
    for number in range(3):
        shown(param(number, epoch=5))
        root.info("[bold]line %d[/bold]", number)
    shown.end()
    root.info("after it")


def test_lines_alone_where_there_is_no_terminal(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root.handlers[0].setStream(sys.stderr)
    bar(root)
    assert capsys.readouterr().err == "".join(f"[bold]line {n}[/bold]\n" for n in range(3)) + "after it\n"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_under_the_lines_on_a_terminal(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Screen()
    monkeypatch.setattr(sys, "stderr", written)
    root.handlers[0].setStream(written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    bar(root)
    text = written.getvalue()
    assert "[bold]line 1[/bold]" in text
    assert "Epoch 5" in text
    assert "3/3" in text
    assert text.endswith("after it\n")
    assert root.handlers[0].stream is written


@contextmanager
def relayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error as launch.py on a terminal reads it; gives the end to read from."""
    monkeypatch.setenv("KVSTORE_COLUMNS", "60")
    read, write = os.pipe()
    os.set_blocking(read, False)
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield read
    os.close(read)


def shown_by(bar: ProgressBar, *params: BatchEndParam) -> None:
    bar.begin(Run(num_batches=3))
    for each in params:
        bar(each)
    bar.end()


def test_a_bar_that_launch_py_shows_is_rewritten_by_carriage_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    with relayed(monkeypatch) as pipe:
        shown_by(ProgressBar(), *(param(number, epoch=5) for number in range(3)))
        first, last, blank, rest = os.read(pipe, 1 << 16).decode().split("\r")
    assert [rest, blank.strip()] == ["", ""]
    for text, count in ((first, "1/3"), (last, "3/3")):  # the second is less than a tenth of a second after the first
        (line,) = screen.seen(text)
        assert line.startswith("Epoch 5 ━")
        assert count in line
        assert len(line) <= 60


def test_no_bar_of_other_ranks_nor_in_a_file_nor_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with relayed(monkeypatch) as pipe:
        with monkeypatch.context() as patched:
            patched.setenv("DMLC_TASK_ID", "1")
            shown_by(ProgressBar(), param(0))
        with monkeypatch.context() as patched:
            patched.setattr(progress, "find_spec", lambda _: None)
            shown_by(ProgressBar(), param(0))
        with pytest.raises(BlockingIOError):
            os.read(pipe, 1)
    shown_by(ProgressBar(), param(0))
    assert capsys.readouterr().err == ""


def test_a_line_every_ten_seconds_where_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    known, unknown = ProgressBar(), ProgressBar()
    known.begin(Run(num_batches=8))
    for number in range(8):
        for each in (known, unknown):
            each(param(number, epoch=1))
        now += 4
    assert caplog.messages == [
        "Epoch[1] 4 of 8 batches (50%)",
        "Epoch[1] 4 batches",
        "Epoch[1] 7 of 8 batches (88%)",
        "Epoch[1] 7 batches",
    ]
