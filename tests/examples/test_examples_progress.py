from __future__ import annotations

import io
import logging
from contextlib import contextmanager

import pytest
from cifar import progress
from cifar.progress import Progress
from rich.console import Console


@pytest.fixture
def new_process(monkeypatch):
    """A context in which the root logger has no handlers, as in a new process."""

    @contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])
            patch.setattr(logging.getLogger(), "level", logging.WARNING)
            yield patch

    return context


def test_plain_lines_where_there_is_no_terminal(new_process, capsys):
    with new_process():
        shown = Progress()
        for number in shown.track(range(3), 3, "Epoch 0"):
            logging.info("Epoch[%d]", number)
    assert capsys.readouterr().err == "INFO:root:Epoch[0]\nINFO:root:Epoch[1]\nINFO:root:Epoch[2]\n"


def test_a_bar_under_the_lines_on_a_terminal(new_process):
    screen = io.StringIO()
    with new_process() as patch:
        patch.setattr(progress, "_terminal", lambda: Console(file=screen, force_terminal=True, width=60))
        shown = Progress()
        for number in shown.track(range(3), 3, "Epoch 0"):
            logging.info("[bold]line %d %s[/bold]", number, 100 * "x")
    assert f"INFO:root:[bold]line 1 {100 * 'x'}[/bold]\n" in screen.getvalue()
    assert "Epoch 0" in screen.getvalue()
