"""When a progress bar is drawn, and that log lines stay above it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
from callback_runs import Run, param

from workers.callbacks import ProgressBar


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
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    root.handlers[0].setStream(screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    bar(root)
    text = screen.getvalue()
    assert "[bold]line 1[/bold]" in text
    assert "Epoch 5" in text
    assert "3/3" in text
    assert text.endswith("after it\n")
    assert root.handlers[0].stream is screen
