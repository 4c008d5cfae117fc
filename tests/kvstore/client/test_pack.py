"""Arrays into messages, and replies into arrays: of any strides, in any order, however payloads are divided."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from placed import entries_for
from threaded import ThreadedJob, set_limits
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.plans import Parcel, Plan, views_of
from kvstore.client.unpack import Writer
from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.member import client as client_module
from kvstore.spec import Key, Spec
from kvstore.transport.shm.presence import available
from kvstore.values import to_buffer

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


SPECS: dict[Key, Spec] = {"cut": Spec((10, 10), "float32"), "a": Spec((3,), "float32"), "b": Spec((2, 2), "float32")}
SOURCES = [torch.arange(100.0).view(10, 10), torch.full((3,), 7.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]])]


def plan_of(specs: dict[Key, Spec] = SPECS, message_bytes: int = 96) -> Plan:
    """Several messages for each of two servers."""
    return Plan(entries_for(specs, servers=2, bound=50, longest=96), list(specs), message_bytes)


def reply_for(parcel: Parcel, seq: int, sources: Sequence[torch.Tensor] = SOURCES, buffers: int = 1) -> wire.Values:
    flat = torch.cat(views_of(parcel, sources))
    return wire.Values(seq, buffers=[to_buffer(part.clone()) for part in flat.chunk(buffers)])


def write(plan: Plan, writer: Writer, order: int = 1, buffers: int = 1) -> None:
    for seq, parcel in list(enumerate(plan.parcels, 1))[::order]:
        for _ in range(2):  # a repeat changes nothing
            writer.take(parcel, reply_for(parcel, seq, buffers=buffers))


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_plain_outputs(order: int, buffers: int) -> None:
    plan, outs = plan_of(), [torch.zeros(tensor.shape) for tensor in SOURCES]
    arrays = plan.outputs(outs)
    assert arrays is not None
    assert len(plan.parcels) > 2
    write(plan, Writer(plan, arrays, copy=True), order, buffers)
    assert all(torch.equal(out, source) for out, source in zip(outs, SOURCES, strict=True))


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_several_outputs_of_a_key_whatever_their_strides(order: int, buffers: int) -> None:
    plan = plan_of()
    outs = [[torch.zeros(source.shape), torch.zeros(source.shape[::-1]).t()] for source in SOURCES[::2]]
    outs.insert(1, [torch.zeros(6)[::2]])
    write(plan, Writer(plan, outs, copy=True), order, buffers)
    for arrays, source in zip(outs, SOURCES, strict=True):
        assert all(torch.equal(out, source) for out in arrays)


def test_many_small_outputs_at_once() -> None:
    specs: dict[Key, Spec] = {key: Spec((3,), "float32") for key in range(100)}
    sources = [torch.full((3,), float(key)) for key in range(100)]
    plan, outs = plan_of(specs, 1 << 20), [torch.zeros(3) for _ in specs]
    arrays = plan.outputs(outs)
    assert arrays is not None
    assert all(parcel.many for parcel in plan.parcels)
    writer = Writer(plan, arrays, copy=True)
    for seq, parcel in enumerate(plan.parcels, 1):
        writer.take(parcel, reply_for(parcel, seq, sources, buffers=2))
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))


def test_without_a_copy_an_output_becomes_the_value() -> None:
    plan, out = plan_of({"a": Spec((3,), "float32")}), torch.zeros(3)
    arrays = plan.outputs([out])
    assert arrays is not None
    reply = reply_for(plan.parcels[0], 1, [torch.full((3,), 5.0)])
    Writer(plan, arrays, copy=False).take(plan.parcels[0], reply)
    assert out.tolist() == [5, 5, 5]
    assert out.data_ptr() == torch.frombuffer(reply.buffers[0], dtype=torch.float32).data_ptr()


@pytest.mark.parametrize("listed", [True, False])
def test_compressed_values_are_decoded(listed: bool) -> None:
    def decode(_reply: wire.Values, targets: Sequence[torch.Tensor]) -> None:
        for target in targets:
            target.fill_(9.0)

    plan = plan_of({"a": Spec((3,), "float32")})
    out = torch.zeros(3)
    outs: Any = [[out]] if listed else plan.outputs([out])
    Writer(plan, outs, copy=True).take(plan.parcels[0], wire.Values(1), decode)
    assert out.tolist() == [9, 9, 9]


def test_an_output_that_has_another_shape_by_then() -> None:
    specs: dict[Key, Spec] = {key: Spec((3,), "float32") for key in range(40)}
    plan, outs = plan_of(specs, 1 << 20), [torch.zeros(3) for _ in specs]
    arrays = plan.outputs(outs)
    assert arrays is not None
    writer = Writer(plan, arrays, copy=True)
    for out in outs:
        out.data = torch.zeros(2)
    with pytest.raises(UsageError, match="another shape or dtype since the call"):
        writer.take(plan.parcels[0], reply_for(plan.parcels[0], 1, [torch.ones(3) for _ in specs]))


def test_writing_disturbs_values_that_lie_where_other_outputs_are() -> None:
    plan = plan_of({"a": Spec((3,), "float32"), "b": Spec((3,), "float32")})
    memory, apart = torch.zeros(9), torch.zeros(3)
    one, two, shifted = memory[:3], memory[3:6], memory[1:4]
    outs = plan.outputs([one, two])
    assert outs is not None
    writer = Writer(plan, outs, copy=True)
    assert not writer.disturbs([one, two]), "each in place"
    assert not writer.disturbs([apart, memory[6:]])
    assert writer.disturbs([two, one])
    assert writer.disturbs([apart, shifted])
    assert Writer(plan, [[one, apart], [two]], copy=True).disturbs([one, apart])
