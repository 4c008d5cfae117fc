"""Orders that come over a socket."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import job_command
from launcher.supervision.control import SOCKET, Control, Orderer
from launcher.supervision.crew import turn


class Job:
    """One that takes orders, and its loop."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.orders: list[tuple[dict[str, str], Orderer]] = []
        self.control = Control(directory, self.selector, lambda order, caller: self.orders.append((order, caller)))
        self._directory = directory

    def say(self, line: bytes) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(5.0)
        link.connect(os.fspath(self._directory / SOCKET))
        link.sendall(line)
        while turn(self.selector, 0.0):
            pass
        return link


@pytest.fixture
def job(short: Path) -> Iterator[Job]:
    made = Job(short)
    yield made
    made.selector.close()


def answers(link: socket.socket) -> list[dict[str, Any]]:
    with link, link.makefile() as lines:
        return [json.loads(line) for line in lines]


def test_an_order_is_taken_and_its_caller_hears_how_it_ends(job: Job) -> None:
    link = job.say(b'{"move": "server:1", "to": "b"}\n')
    ((order, caller),) = job.orders
    assert order == {"move": "server:1", "to": "b"}
    caller.say("moving")
    caller.end(0, "done")
    assert answers(link) == [{"say": "moving"}, {"end": 0, "say": "done"}]
    job.control.close()


@pytest.mark.parametrize("line", [b"x" * 5000, b"{}{\n", b"[1]\n", b'{"move": 1}\n'])
def test_what_is_no_order_is_refused(job: Job, line: bytes) -> None:
    assert [answer["end"] for answer in answers(job.say(line))] == [2]
    assert job.orders == []
    job.control.close()


def test_who_has_left_is_forgotten_and_who_waits_hears_that_the_job_has_ended(job: Job) -> None:
    job.say(b"{}\n").close()
    turn(job.selector, 0.0)
    job.orders[0][1].end(0, "nobody hears it")
    waiting = job.say(b"{}\n")
    job.control.close()
    assert answers(waiting) == [{"end": 4, "say": "the job has ended"}]


def test_where_no_job_runs_nothing_can_be_ordered(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_command, "roots_here", lambda: [short])
    assert job_command.main(["move-server", "server:0"]) == 1
    assert "which job?" in capsys.readouterr().err
    assert job_command.main(["drain-host", "node1", "--job", "4711"]) == 1
    assert "no job here is '4711'" in capsys.readouterr().err
