"""Readers over every kind of link, and what they may not do: with a reader's key, in any name, nothing changes."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import sender
from reading_job import KeyedJob, job_with_readers, reader_of
from threaded import ThreadedJob
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded
from kvstore.job.curve_keys import pair
from kvstore.transport.zeromq import ZmqTransport

SIZE = 3000  # elements, so that each server has a part


def train(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(SIZE))
        with reader_of(job) as reader:
            for rounds in range(3):
                assert reader.pull("w").tolist() == [rounds] * SIZE
                store.pushpull("w", -torch.ones(SIZE), out=torch.empty(SIZE))

    job.run(work)


@pytest.mark.parametrize("kind", ["unix", "shm", "tcp", "zeromq"])
def test_readers_over_every_kind_of_link(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o700)
    where = {"directory": tmp_path} if kind in ("unix", "shm") else {}
    with job_with_readers(kind=kind, **where) as job:
        train(job)


def test_readers_with_a_key_of_their_own() -> None:
    with KeyedJob() as job:
        train(job)


def test_a_stranger_with_another_key_hears_nothing() -> None:
    with KeyedJob() as job:
        known, job.reader = job.reader, pair()
        with pytest.raises(DeadlineExceeded, match="is the key this job's"), reader_of(job, timeout=0.5):
            pass
        job.reader = known


def forged(me: wire.Sender) -> list[wire.Request]:
    data = bytearray(4 * SIZE)
    return [
        wire.Open(me, 0, "sync"),
        wire.Init(me, 0, [99], ["x"], [0], [[SIZE]], "float32", [data]),
        wire.InitTables(me, 0, [98], ["t"], [[10, [2], "float32", "zeros", 1.0, 0, [], [], "none"]], 0, 2),
        wire.Push(me, 0, [0], [1], True, None, None, buffers=[data]),
        wire.Pull(me, 0, [0], [0]),
        wire.SetOptimizer(me, 0, 2, "sgd", [], None, [], [], 9.0, 1.0),
        wire.PutStates(me, 0, [], [], [], [], []),
        wire.Pause(me, 0, 1, 0, [], []),
        wire.EvictRows(me, 0, 0, 1),
        wire.Close(me, 0),
    ]


def forged_for_the_scheduler(me: wire.Sender) -> list[wire.Request]:
    return [
        wire.Join(me._replace(node=me.node._replace(rank=-1, incarnation=99)), ""),
        wire.Declare(me, 0, ["x"], [0], [[3]], ["float32"], 1, 1 << 20),
        wire.Ready(me, 0, ["w"]),
        wire.Barrier(me, 0, 1),
        wire.Pause(me, 0, 1, 0, [], []),
        wire.Leave(me, "it has failed"),
    ]


class Intruder:
    """An end of links with the readers' key, which says what it likes."""

    def __init__(self, job: KeyedJob) -> None:
        config = job.config("reader")
        self._transport = ZmqTransport(keys=config.keys)
        self._links: dict[str, bytes] = {}

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._transport.close()

    def say(self, endpoint: str, message: wire.Message) -> None:
        if endpoint not in self._links:
            self._links[endpoint] = self._transport.connect(endpoint)
        self._transport.send(self._links[endpoint], wire.encode(message))

    def ask(self, endpoint: str, request: wire.Request) -> Any:
        self.say(endpoint, request)
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            received = self._transport.recv(0.1)
            if received is not None and received[1]:
                reply = wire.decode(received[1])
                if reply.seq == request.seq:
                    return reply
        raise queue.Empty


@pytest.mark.parametrize("role", ["worker", "reader", "server"])
def test_with_a_readers_key_nothing_can_be_changed(role: str) -> None:
    with KeyedJob() as job:

        def work(store: DistStore) -> None:
            store.set_optimizer("sgd", learning_rate=1.0)
            store.init("w", torch.zeros(SIZE))
            addresses = job.sessions[0].addresses
            with Intruder(job) as intruder:
                me = sender(0, 10**6, role=role)
                for address in addresses:
                    for request in forged(me):
                        assert isinstance(intruder.ask(address, request), wire.Failure), request
                root = job.config("reader").root
                intruder.say(root, wire.Beat(wire.Node(role, 0, 1)))
                intruder.say(root, wire.Lost("worker", 0, "was killed"))
                intruder.say(root, wire.Lost("scheduler", 0, "was killed"))
                for request in forged_for_the_scheduler(me):
                    reply = intruder.ask(root, request)
                    assert isinstance(reply, wire.Failure) or (role == "reader" and isinstance(request, wire.Leave)), (
                        request
                    )
            store.pushpull("w", -torch.ones(SIZE), out=(w := torch.empty(SIZE)))
            assert w.tolist() == [1] * SIZE

        job.run(work)
