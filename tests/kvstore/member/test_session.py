"""Whole jobs inside this process: joining, leaving, silence, and errors that reach the worker."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from inproc import InprocNetwork
from tapped import Tapped, outcome
from threaded import ThreadedJob
from waiting import LONG, until

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import (
    JOB_FAILED_EXIT,
    Mismatch,
    NodeLost,
    ServerError,
    UsageError,
)
from kvstore.job.config import Config
from kvstore.member import session as sessions
from kvstore.member.session import Session
from servers.scheduler_process import run_scheduler


def test_a_workers_pushes_and_pulls_go_to_its_aggregator():
    network = InprocNetwork()
    job = Config(root="inproc://scheduler", num_workers=2, num_servers=2, num_aggregators=1, heartbeat_timeout_s=LONG)
    scheduler = threading.Thread(
        target=run_scheduler, args=(dataclasses.replace(job, role="scheduler"), network.transport())
    )
    scheduler.start()

    def joined(role: str, rank: int, aggregator: int = -1) -> Session:
        config = dataclasses.replace(job, role=role, rank_hint=rank, aggregator=aggregator)
        address = "" if role == "worker" else network.transport().bind(f"inproc://{role}-{rank}")
        return Session(config, network.transport, address).join()

    members = [("worker", 0, 0), ("worker", 1, -1), ("server", 0, -1), ("server", 1, -1), ("aggregator", 0, -1)]
    with ThreadPoolExecutor(len(members)) as pool:
        first, second, *servers, aggregator = sessions = list(pool.map(lambda member: joined(*member), members))
    assert first.carrier(0) == first.carrier(1) == first.aggregator != b""
    assert first.aggregator not in first.servers, "which hear of all that is not for the aggregator"
    assert (second.aggregator, second.carrier(1)) == (None, second.servers[1])
    assert len(aggregator.addresses) == 2
    assert [session.aggregated for session in sessions] == [[], [], [[0]], [[0]], [[0]]]
    assert (servers[0].servers, aggregator.aggregator) == ([], None)
    for session in sessions:
        session.leave()
    scheduler.join(LONG)
    assert not scheduler.is_alive()


# ---- endings


def test_everybody_ends_with_0_when_the_workers_are_done():
    with ThreadedJob(2, 2) as cluster:
        assert cluster.run(lambda store: store.rank) == [0, 1]
    assert cluster.exit_codes == {"scheduler": 0, "server 0": 0, "server 1": 0}


def test_a_worker_that_fails_ends_the_job_for_all_with_its_words():
    with ThreadedJob(2, 1) as cluster:
        barrier = threading.Barrier(2)

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(3))
            barrier.wait(LONG)
            if session.rank == 1:
                session.leave("ValueError: bad data")
                return None
            return outcome(lambda: store.pushpull("w", torch.zeros(3)))

        error = cluster.run_sessions(work)[0]
    assert isinstance(error, NodeLost)
    assert str(error) == "worker 1 failed: ValueError: bad data"
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}


def test_after_leaving_the_session_says_so():
    with ThreadedJob(1, 1) as cluster:

        def work(session: Session) -> None:
            store = DistStore(session)
            store.init("w", torch.zeros(1))
            session.leave()
            session.leave()
            with pytest.raises(UsageError, match="this process has left the job"):
                store.push("w", torch.zeros(1))

        cluster.run_sessions(work)
    assert set(cluster.exit_codes.values()) == {0}


# ---- silence


@pytest.mark.parametrize("silent", ["worker 1", "server 1"])
def test_who_falls_silent_is_named_to_all_survivors(silent: str):
    with Tapped(workers=3, servers=2) as cluster:
        barrier = threading.Barrier(3)

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(10))
            barrier.wait(LONG)
            if session.rank == 0:
                cluster.silence(silent)
            if silent == f"worker {session.rank}":
                return outcome(lambda: session.heartbeat_ended(LONG) and session.check(0))
            return outcome(store.barrier if session.rank else lambda: store.pushpull("w", torch.zeros(10)).wait())

        results = cluster.run_sessions(work)
    for rank, error in enumerate(results):
        if silent == f"worker {rank}":
            assert isinstance(error, NodeLost)
            assert str(error).startswith("the scheduler at inproc://scheduler has been silent for")
        else:
            assert isinstance(error, NodeLost), error
            assert str(error).startswith(f"{silent} is lost: it has been silent for")
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}


def test_a_silent_scheduler_is_lost_for_all():
    with Tapped(workers=2, servers=2) as cluster:

        def work(session: Session) -> Any:
            store = DistStore(session)
            store.init("w", torch.zeros(10))
            store.barrier()
            if session.rank == 0:
                cluster.silence("scheduler")
            return outcome(store.barrier)

        results = cluster.run_sessions(work)
    for error in results:
        assert isinstance(error, NodeLost)
        assert str(error).startswith("the scheduler at inproc://scheduler has been silent for")
    assert cluster.exit_codes["server 0"] == cluster.exit_codes["server 1"] == JOB_FAILED_EXIT


# ---- errors that reach the worker


def test_an_optimizer_that_cannot_be_made_raises_in_every_worker_with_the_servers_message():
    with ThreadedJob(2, 2) as cluster:
        results = cluster.run(lambda store: outcome(lambda: store.set_optimizer("sgd", learning_rate=-1.0)))
    for error in results:
        assert isinstance(error, ServerError)
        assert str(error) == "ValueError: Invalid learning rate: -1.0"


def test_an_update_that_fails_raises_in_every_worker():
    with ThreadedJob(2, 2, bigarray_bound=4) as cluster:

        def work(store: DistStore) -> Any:
            store.set_optimizer("sgd", learning_rate=0.1)
            store.init("w", torch.zeros(8))
            store.set_learning_rate(0.1 * (store.rank + 1))
            ticket = store.push("w", torch.ones(8))
            error = outcome(lambda: ticket.wait(LONG))
            store.set_learning_rate(0.5)
            out = torch.zeros(8)
            store.pushpull("w", torch.ones(8), out)
            return str(error), out.tolist()

        words = "workers disagree on the learning rate for the same round of 'w': 0.1 on worker 0, 0.2 on worker 1"
        assert cluster.run(work) == [(words, [-1.0] * 8)] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_workers_that_give_a_key_different_shapes_both_learn_it(first: int):
    """Whoever comes first; rank 0, whose init is over by then, at its next call."""
    with ThreadedJob(2, 1, heartbeat_s=0.05) as cluster:
        come = threading.Event()

        def work(session: Session) -> Any:
            store = DistStore(session, timeout=LONG)
            init = outcome(lambda: store.init("ok", torch.zeros(1)))
            assert init is None
            if session.rank != first:
                assert come.wait(LONG)
            if session.rank == first == 1:
                threading.Timer(0.05, come.set).start()
            error = outcome(lambda: store.init("w", torch.zeros(2 + session.rank)))
            come.set()
            while error is None:  # rank 0's call may be over; the next ones are told
                error = outcome(lambda: store.pull("ok", torch.zeros(1)) and None)
            return error

        for error in cluster.run_sessions(work):
            assert isinstance(error, Mismatch)
            assert "key 'w' is float32[" in str(error)


# ---- what only a broken scheduler does


def test_who_has_been_replaced_goes_without_a_word() -> None:
    with Tapped(workers=2, servers=1) as job:
        job.sessions[1].abandon()
        assert job.sessions[1].heartbeat_ended(LONG)
        with pytest.raises(UsageError, match="this process has left the job"):
            job.sessions[1].num_dead_nodes()
        until(lambda: "worker 1 is lost" in str(job.sessions[0].client.failure))  # to the scheduler it is dead


def test_leaving_without_the_schedulers_answer_says_so_and_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sessions, "LEAVE_S", 0.05)
    monkeypatch.setattr("kvstore.member.client.EXPLAIN_S", 0.05)
    network = InprocNetwork()
    far = network.transport()
    far.bind("inproc://scheduler")
    stop = threading.Event()

    def welcome_and_nothing_else() -> None:
        while not stop.is_set():
            received = far.recv(0.05)
            if received is not None:
                message = wire.decode(received[1])
                reply = wire.Welcome(message.seq, 0, 1, 1, []) if isinstance(message, wire.Join) else wire.Alive()
                far.send(received[0], wire.encode(reply))

    thread = threading.Thread(target=welcome_and_nothing_else)
    thread.start()
    try:
        session = Session(Config("worker", "inproc://scheduler", 1, 1), network.transport).join()
        session.leave()
    finally:
        stop.set()
        thread.join()
    assert "left the job without the scheduler's answer: leaving the job is not done after 0.05 s" in caplog.text
    assert session.heartbeat_ended(0)
