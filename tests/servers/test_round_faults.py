"""Faults of a server's own, by its rounds."""

from __future__ import annotations

import signal

import pytest
import torch
from threaded import ThreadedJob

from kvstore import wire
from servers.requests.replies import Outbox
from servers.round_faults import injecting


def test_without_faults_nothing_is_looked_for() -> None:
    def handle(peer: bytes, message: wire.Message) -> Outbox:
        return []

    assert injecting(handle, [], lambda: 0) is handle


def test_a_fault_comes_once_after_its_round_and_before_its_answers_leave() -> None:
    rounds = 0
    sent: list[int] = []

    def handle(peer: bytes, message: wire.Message) -> Outbox:
        nonlocal rounds
        rounds += 1
        return [(peer, message)]

    faulty = injecting(handle, [("stop", 2), ("kill", 4)], lambda: rounds, sent.append)
    seen = []
    for _ in range(5):
        assert faulty(b"p", wire.Alive()) == [(b"p", wire.Alive())]
        seen.append(list(sent))
    assert seen == [[], [signal.SIGSTOP], [signal.SIGSTOP], *[[signal.SIGSTOP, signal.SIGKILL]] * 2]


def test_rounds_may_have_been_missed() -> None:
    sent: list[int] = []
    faulty = injecting(lambda peer, message: [], [("stop", 2), ("kill", 4)], lambda: 9, sent.append)
    faulty(b"p", wire.Alive())
    assert sent == [signal.SIGSTOP, signal.SIGKILL]


def test_a_fault_that_has_not_come_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedJob(1, 1, inject=(("kill", 999_999),)) as job:
        job.run(lambda store: store.init("w", torch.zeros(3)))
    assert "--inject: no kill at round 999999: there were 0 rounds in this job" in caplog.text
