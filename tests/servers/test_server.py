"""A member with a shard: what its thread has written is reported in the loop, as an answer."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from threaded import ThreadedJob

from kvstore import wire
from kvstore.checkpoint.folders import begin
from kvstore.errors import JOB_FAILED_EXIT, NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.member.session import Session
from kvstore.transport import Transport
from kvstore.values import to_buffer
from servers.member import ServingMember, Surroundings
from servers.processes import run_server
from servers.requests.replies import Outbox
from servers.server import Server, injecting


class Noting(Server):
    """Notes the answers that no message has asked for at that moment."""

    noted: list[Outbox]

    def _answer(self, outbox: Outbox) -> Outbox:
        self.noted.append(outbox)
        return super()._answer(outbox)


def test_a_file_is_written_beside_the_loop_and_reported_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Noting.noted = []

    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        config = dataclasses.replace(config, checkpoint_dir=str(tmp_path))
        return Noting(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()

    def save(session: Session) -> wire.Captured:
        (server,) = session.servers
        value = to_buffer(torch.arange(4.0))
        session.client.call(server, "opening", wire.Open, store=0, mode="sync", staleness=None)
        first = {"ids": [3], "keys": ["w"], "kinds": [0], "shapes": [[4]], "dtype": "float32"}
        session.client.call(server, "init", wire.Init, store=0, buffers=wire.pack_arrays([value]), **first)
        session.client.call(server, "capture", wire.Capture, store=0, number=5, ids=[3], clocks=[0])
        reply = session.client.call(server, "waiting", wire.AwaitCapture, store=0, number=5)
        assert isinstance(reply, wire.Captured)
        return reply

    monkeypatch.setattr("threaded.run_server", run)
    folder = begin(tmp_path, 5)
    with ThreadedJob(1, 1) as job:
        (reply,) = job.run_sessions(save)
    assert Path(reply.path) == folder / "store-0.server-0.safetensors"
    assert Path(reply.path).stat().st_size == reply.nbytes
    assert len(Noting.noted) == 1


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


def test_of_a_job_that_ends_in_order_both_return_0() -> None:
    with ThreadedJob(1, 1) as job:
        pass
    assert job.exit_codes == {"scheduler": 0, "server 0": 0}


def test_of_a_job_that_fails_both_return_the_code_for_that(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedJob(1, 1) as job:
        job.run_sessions(lambda session: session.leave("it diverged"))
    assert job.exit_codes == {"scheduler": JOB_FAILED_EXIT, "server 0": JOB_FAILED_EXIT}
    assert "server 0 ends: worker 0 failed: it diverged" in caplog.messages


class Failing(ServingMember):
    def _serve(self) -> None:
        raise ZeroDivisionError("by itself")

    def _notice(self, notice: wire.Message) -> Outbox:
        return []


def test_one_that_may_not_join_frees_its_endpoint() -> None:
    with ThreadedJob(1, 1) as job:
        with pytest.raises(UsageError, match="the job has its 1 servers already"):
            run_server(job.config("server", 1), job.network.transport, "inproc://server-1")
        again: Transport = job.network.transport()
        again.bind("inproc://server-1")  # an endpoint that is in use is refused
        again.close()


def test_the_error_that_ends_one_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        with pytest.raises(ZeroDivisionError):
            Failing(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()
        return 1

    monkeypatch.setattr("threaded.run_server", run)
    with ThreadedJob(1, 1) as job:
        with pytest.raises(NodeLost, match=r"server 0 failed: it ended with ZeroDivisionError\('by itself'\)"):
            job.run(lambda store: store.init("w", [1.0]))
        job.sessions[0].client.failure = None
