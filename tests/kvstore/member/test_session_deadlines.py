"""Waits of whole jobs inside this process that end at their deadlines: whom the errors name, and what goes on."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inproc import InprocNetwork
from tapped import outcome
from threaded import ThreadedJob
from waiting import LONG

from kvstore.client import DistStore
from kvstore.errors import (
    DeadlineExceeded,
    UsageError,
)
from kvstore.job.config import Config
from kvstore.member import client
from kvstore.member.session import Session
from kvstore.transport.sockets.socket_transport import TcpTransport
from servers.processes import run_server


@pytest.mark.parametrize("aggregators", [0, 1])
def test_a_late_pull_names_the_worker_the_push_and_the_key_and_where_it_is(aggregators: int):
    with ThreadedJob(2, 2, aggregators=aggregators) as cluster:

        def work(store: DistStore) -> Any:
            store.init(["w", "x"], [torch.zeros(4), torch.zeros(4)])
            error = None
            if store.rank == 0:
                store.push("w", torch.ones(4))
                ticket = store.pull("w", torch.zeros(4), wait=False)
                error = outcome(lambda: ticket.wait(0.05))
            store.barrier()
            if store.rank == 1:
                store.push("w", torch.ones(4))
            return error

        error = cluster.run(work)[0]
    assert isinstance(error, DeadlineExceeded)
    asked = "aggregator 0" if aggregators else "server "
    assert str(error).startswith(f"pull of 'w' is not done after 0.05 s: {asked}")
    reason, _, place = str(error).rpartition("; worker 1 is at ")
    assert reason.endswith(" worker 1, whose push 1 of 'w' is missing")
    assert " in " in place
    assert error.silent == ()


def test_late_calls_to_the_scheduler_name_whom_they_wait_for():
    with ThreadedJob(2, 1) as cluster:

        def work(session: Session) -> list[str]:
            impatient = DistStore(session, timeout=0.05)
            if session.rank == 0:
                return [str(outcome(impatient.barrier))]
            errors = [str(outcome(lambda: impatient.init("w", torch.zeros(1))))]
            return [*errors, str(outcome(lambda: impatient.set_optimizer("sgd")))]

        results = cluster.run_sessions(work)
    assert {result.partition("; worker ")[0] for result in results[0]} <= {
        f"barrier is not done after 0.05 s: the scheduler waits at the barrier for worker 1 ({where})"
        for where in ("has not come yet", "is in init()")
    }
    assert all("; worker 0 is at " in result for result in results[1])
    assert [result.partition("; worker ")[0] for result in results[1]] == [
        "init of 'w' is not done after 0.05 s: the scheduler waits for worker 0 to init 'w'",
        "set_optimizer is not done after 0.05 s: server 0 waits for worker 0, which has not called set_optimizer",
    ]


def test_joining_in_vain_names_the_absent():
    network = InprocNetwork()
    scheduler = network.transport()
    scheduler.bind("inproc://scheduler")
    from servers.scheduler import Scheduler
    from servers.service import Service

    core = Scheduler(2, 1, 10.0)
    service = Service(scheduler)
    thread = threading.Thread(target=service.run, args=(lambda peer, message: core.handle(peer, message, 0.0),))
    thread.start()
    try:
        config = Config("worker", "inproc://scheduler", 2, 1, rank_hint=1, timeout_s=0.05, patience_s=0.05)
        with pytest.raises(DeadlineExceeded) as info:
            Session(config, network.transport).join()
        assert str(info.value) == (
            "joining the job at inproc://scheduler is not done after 0.05 s: "
            "the scheduler waits for worker 0 and server 0 to join"
        )
    finally:
        service.stop()
        thread.join()


def test_a_worker_that_gave_up_joining_may_come_back():
    """The scheduler would count it as there for ever, and refuse its next attempt."""

    class Hasty(ThreadedJob):
        def join(self, rank: int) -> None:
            if rank == 0:
                hasty = dataclasses.replace(self.config("worker", 0), timeout_s=0.05, patience_s=0.05)
                with pytest.raises(DeadlineExceeded, match=r"waits for .*worker 1"):
                    Session(hasty, self.ends(hasty)).join()
                given_up.set()
            else:
                assert given_up.wait(LONG)
            super().join(rank)

    given_up = threading.Event()
    with Hasty(2, 1) as cluster:
        assert cluster.run(lambda store: store.rank) == [0, 1]
    assert set(cluster.exit_codes.values()) == {0}


@pytest.mark.parametrize("role", ["worker", "server"])
def test_joining_without_a_scheduler_ends_at_the_deadline(role: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    network = InprocNetwork()
    config = Config(role, "inproc://scheduler", 1, 1, timeout_s=0.05)
    joins: dict[str, Callable[[], Any]] = {
        "worker": lambda: Session(config, network.transport).join(),
        "server": lambda: run_server(config, network.transport, "inproc://server-0"),
    }
    with pytest.raises(DeadlineExceeded, match="the scheduler does not answer") as info:
        joins[role]()
    assert info.value.silent == ("the scheduler",)
    network.transport().bind("inproc://server-0")  # which is free again


def test_a_server_waits_on_while_the_scheduler_lives(caplog: pytest.LogCaptureFixture):
    """It may be there long before the workers; only a scheduler that does not answer ends its patience."""
    waited = threading.Event()

    class Patient(ThreadedJob):
        def config(self, role: str, rank: int = -1) -> Config:
            return dataclasses.replace(super().config(role, rank), timeout_s=0.05 if role == "server" else LONG)

        def join(self, rank: int) -> None:
            assert waited.wait(LONG)
            super().join(rank)

    cluster = Patient(1, 1)
    warn = client.log.warning
    client.log.warning = lambda *args: (waited.set(), warn(*args))  # type: ignore[assignment,method-assign]
    try:
        with cluster:
            assert cluster.run_sessions(lambda session: session.rank) == [0]
    finally:
        client.log.warning = warn  # type: ignore[method-assign]
    assert "the scheduler waits for worker 0 to join" in caplog.text
    assert cluster.exit_codes == {"scheduler": 0, "server 0": 0}


def test_who_is_not_wanted_is_told():
    with ThreadedJob(1, 1) as cluster:
        config = cluster.config("worker")
        with pytest.raises(UsageError, match="the job has its 1 workers already"):
            Session(config, cluster.ends(config)).join()


def test_a_scheduler_whose_name_nobody_knows_is_not_only_silent(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    config = Config("worker", "tcp://nosuch.invalid:9091", 1, 1, join_timeout_s=0.05)
    with pytest.raises(
        DeadlineExceeded, match=r"does not answer: cannot resolve .nosuch\.invalid., .*not known"
    ) as caught:
        Session(config, TcpTransport).join()
    assert caught.value.silent == ("the scheduler",)
