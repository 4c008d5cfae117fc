"""Arrays that are sent from where they lie: what counts is what they were when they were passed."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob, set_limits
from waiting import LONG

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded
from kvstore.member import client as client_module
from kvstore.transport.shm.presence import available

KEYS = list(range(6))
SIZE = 50_000  # elements, of which many messages are made


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(params=["memory", "sockets"])
def job(request: pytest.FixtureRequest, directory: Path) -> Iterator[ThreadedJob]:
    where = directory if request.param == "sockets" else None
    with ThreadedJob(2, 2, piece_bytes=32 << 10, directory=where) as made:
        yield made


def started(store: DistStore, keys: list[int]) -> list[torch.Tensor]:
    """The keys, made; and values for them."""
    store.init(keys, [torch.zeros(SIZE) for _ in keys])
    return [torch.full((SIZE,), float(10 * key + store.rank + 1)) for key in keys]


def sums(keys: list[int]) -> list[float]:
    return [20 * key + 3.0 for key in keys]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("plain", [True, False], ids=["tensors", "lists of tensors"])
def test_new_values_may_go_where_other_values_are(job: ThreadedJob, wait: bool, plain: bool):
    def rotate(store: DistStore) -> list[torch.Tensor]:
        values = started(store, KEYS)
        for _ in range(3):  # from the second on, the list is known
            given = [value.clone() for value in values]
            outs = given[1:] + given[:1]
            store.pushpull(KEYS, given if plain else [[value] for value in given], out=outs, wait=wait).wait()
        return outs

    for outs in job.run(rotate):
        assert [out.unique().tolist() for out in outs] == [[total] for total in sums(KEYS)]


def test_new_values_may_go_where_a_part_of_the_values_is(job: ThreadedJob):
    def shift(store: DistStore) -> list[torch.Tensor]:
        started(store, KEYS[:1])
        for _ in range(3):
            memory = torch.arange(SIZE + 1.0)
            store.pushpull([0], [memory[:-1]], out=[memory[1:]])
        return [memory[1:]]

    for (out,) in job.run(shift):
        assert out.equal(2 * torch.arange(SIZE + 0.0))


def test_the_same_memory_in_and_out(job: ThreadedJob):
    def same(store: DistStore) -> list[torch.Tensor]:
        values = started(store, KEYS)
        store.pushpull(KEYS, values)
        return values

    for outs in job.run(same):
        assert [out.unique().tolist() for out in outs] == [[total] for total in sums(KEYS)]


@pytest.mark.skipif(not available(), reason="memory cannot be shared here")
def test_an_array_of_the_stores_is_pushed_from_where_it_is(directory: Path, monkeypatch: pytest.MonkeyPatch):
    cat, copied = torch.cat, []

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        if threading.current_thread().name == "worker 0":
            copied.append(1)
        return cat(*args, **options)

    def work(store: DistStore) -> None:
        ours, plain, out = store.empty((300, 400)), torch.ones(300, 400), torch.zeros(300, 400)
        store.init("w", plain)
        copied.clear()
        for step in range(3):
            store.pushpull("w", ours.fill_(step), out=out)
            assert (out == step).all()
        assert not copied
        store.pushpull("w", plain, out=out)
        assert copied

    monkeypatch.setattr(torch, "cat", noting)
    with ThreadedJob(1, 1, directory=directory, kind="shm") as job:
        job.run(work)


def test_arrays_may_change_after_a_call_that_failed(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """What the socket had not taken by then goes out later, as it was."""
    stuck, failed = threading.Event(), threading.Event()
    recv_into = socket.socket.recv_into

    def reluctant(made: socket.socket, *room: Any) -> int:
        if stuck.is_set() and made.getsockname():  # of the scheduler and the servers, which listen at a path
            time.sleep(0.005)
            raise BlockingIOError
        return recv_into(made, *room)

    monkeypatch.setattr(socket.socket, "recv_into", reluctant)
    monkeypatch.setattr(client_module, "EXPLAIN_S", 0.1)  # nobody will

    def work(store: DistStore) -> list[torch.Tensor]:
        values, outs = started(store, KEYS), [torch.empty(SIZE) for _ in KEYS]
        store.pushpull(KEYS, values, outs)  # from the second time on, arrays are sent from where they lie
        store.barrier()
        if store.rank == 0:
            stuck.set()
            set_limits(store, 0.5)
            with pytest.raises(DeadlineExceeded):
                store.pushpull(KEYS, values)
            set_limits(store, LONG)
            for value in values:
                value.fill_(1e9)
            stuck.clear()
            failed.set()
        else:
            assert failed.wait(LONG)
            store.push(KEYS, values)
        store.pull(KEYS, outs)
        return outs

    with ThreadedJob(2, 2, piece_bytes=32 << 10, directory=directory) as job:
        results = job.run(work)
    for outs in results:
        assert [out.unique().tolist() for out in outs] == [[total] for total in sums(KEYS)]
