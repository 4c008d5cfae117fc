"""Arrays into messages, and replies into arrays: of any strides, in any order, however payloads are divided."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for
from threaded import ThreadedJob, set_limits
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.pack import OutgoingRows, Striped, block_of
from kvstore.client.plans import Parcel, Plan, RowPlan, views_of
from kvstore.client.unpack import IncomingRows, UnionRows, Writer
from kvstore.errors import DeadlineExceeded, UsageError, WireError
from kvstore.member import client as client_module
from kvstore.rows.ids import stripes_of
from kvstore.rows.layout import read_rows
from kvstore.rows.row_arguments import Wanted
from kvstore.rows.row_sparse import RowSparse
from kvstore.spec import Key, Spec
from kvstore.table import Table, TableSpec
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
    Writer(plan, outs, copy=True).take(plan.parcels[0], wire.Values(1, lengths=[1]), decode)
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


KINDS = {
    "alike": [Table(shape=(50, 4)), Table(shape=(90, 4), init="normal")],
    "odd": [Table(shape=(50, 3)), Table(shape=(90, 5))],
    "doubles": [Table(shape=(50, 4)), Table(shape=(90, 3), dtype="float64")],
    "encoded": [Table(shape=(50, 4), codec="fp16"), Table(shape=(90, 7), codec="int8")],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[[1, 3, 4, 8], [2, 89]], [[], [0, 1, 2]], [[], []], [[1], [1]]])
def test_each_server_gets_its_rows(kind: str, ids: list[list[int]]):
    tables = KINDS[kind]
    specs: dict[str, Spec] = {str(number): TableSpec.of(table) for number, table in enumerate(tables)}
    plan = RowPlan(entries_for(specs, 2, 10), list(specs))
    numbers = [np.array(each, np.int64) for each in ids]
    rows = [
        np.outer(each + 1, np.ones(table.width)).astype(table.dtype)
        for each, table in zip(numbers, tables, strict=True)
    ]
    outgoing = OutgoingRows(plan, numbers, rows)
    for server in range(2):
        lengths = plan.lengths(outgoing.striped.counts[server])
        assert outgoing.nbytes(server) == sum(lengths)
        buffer, at = memoryview(bytearray(sum(lengths))), 0
        outgoing.write(server, buffer)
        travelling = outgoing.striped.ids(server)
        for table, count, length in zip(tables, outgoing.striped.counts[server], lengths, strict=True):
            part = read_rows(buffer[at : at + length], count, table.width, table.dtype, table.codec)
            own, travelling = travelling[:count], travelling[count:]
            assert np.allclose(part, np.outer(own + 1, np.ones(table.width)), rtol=0.01)
            at += length
        assert not len(travelling)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("gap", [0, 1])
def test_rows_of_one_array_go_and_come_in_one_step(servers: int, gap: int) -> None:
    """As they do one table after the other, with other rows between them or none."""
    tables = [Table(shape=(90, 4)), Table(dim=4), Table(shape=(7, 4))]
    specs: dict[str, Spec] = {str(number): TableSpec.of(table) for number, table in enumerate(tables)}
    plan = RowPlan(entries_for(specs, servers, 10), list(specs))
    ids = [np.array(each, np.int64) for each in ([1, 3, 4, 80], [-(2**50), 5, 2**40], [0, 6])]
    sizes = [len(each) for each in ids]
    whole = torch.arange(4.0 * (sum(sizes) + 3 * gap)).view(-1, 4)
    parts = [part[: len(part) - gap] for part in whole.split([size + gap for size in sizes])]
    arrays = [part.numpy() for part in parts]
    outgoing = OutgoingRows(plan, ids, arrays, block_of(parts, 4))
    expected = OutgoingRows(plan, ids, arrays)
    back = torch.zeros_like(whole)
    outs = [part[: len(part) - gap] for part in back.split([size + gap for size in sizes])]
    incoming = IncomingRows(plan, Striped(plan, ids), [out.numpy() for out in outs], block_of(outs, 4))
    for parcel in plan.parcels:
        buffers = [memoryview(bytearray(outgoing.nbytes(parcel.server))) for _ in range(2)]
        for each, buffer in zip((outgoing, expected), buffers, strict=True):
            each.write(parcel.server, buffer)
        assert bytes(buffers[0]) == bytes(buffers[1])
        incoming.take(parcel, wire.Rows(1, incoming.counts(parcel.server), buffers=[buffers[0]]))
    for out, part in zip(outs, parts, strict=True):
        assert torch.equal(out, part)
    if gap:
        assert not back[len(parts[0])].any()


ids = st.lists(st.integers(0, 999), unique=True, max_size=30).map(lambda each: np.array(sorted(each), np.int64))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), ids), min_size=1, max_size=4), st.integers(1, 5))
def test_each_id_is_at_the_server_that_has_its_row(listed, servers):
    specs: dict[str, Spec] = {
        str(number): TableSpec.of(Table(dim=2) if grows else Table(shape=(1000, 2)))
        for number, (grows, _) in enumerate(listed)
    }
    plan = RowPlan(entries_for(specs, servers, 10), list(specs))
    given_ids = [each for _, each in listed]
    striped = Striped(plan, given_ids)
    seen: list[set[int]] = [set() for _ in listed]
    for server in range(servers):
        travelling = striped.ids(server)
        assert travelling.dtype == (np.int64 if plan.wide else np.int32)
        assert len(travelling) == striped.total(server) == sum(striped.counts[server])
        parts = np.split(travelling, np.cumsum(striped.counts[server])[:-1])
        of = zip(plan.tables, given_ids, parts, striped.positions(server), seen, strict=True)
        for table, all_ids, part, positions, found in of:
            assert np.array_equal(all_ids[positions], part)
            assert bool((part[1:] > part[:-1]).all())
            assert set(stripes_of(table, part.astype(np.int64), servers).tolist()) <= {server}
            found.update(part.tolist())
    assert seen == [set(each.tolist()) for each in given_ids]


def test_the_array_has_all_memory_of_the_parts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    block = block_of([whole[3:5], whole[1:1], whole[0:2].detach()], 4)
    assert block is not None
    assert block.firsts.tolist() == [3, 1, 0]
    assert block.rows.tolist() == whole.tolist()
    block.rows[0] = 7
    assert whole[0].tolist() == [7, 7, 7, 7]


def test_rows_in_memory_of_their_own_are_no_block() -> None:
    whole = torch.zeros(6, 4)
    assert block_of([whole[1:3], torch.zeros(1, 4)], 4) is None
    assert block_of([whole.view(-1)[2:10].view(2, 4), whole[4:]], 4) is None


def asked(width: int, ids: Any, out: Any) -> tuple[RowPlan, Wanted]:
    table = Table(shape=(20, width))
    wanted = Wanted("a pull", table)
    wanted.add(ids, out)
    return RowPlan(entries_for({"t": TableSpec.of(table)}, 2, 10), ["t"]), wanted


def reply(ids: list[int], width: int) -> wire.Rows:
    rows = np.outer(ids, np.ones(width, np.float32)).astype(np.float32)
    return wire.Rows(1, [len(ids)], buffers=[rows.tobytes() + bytes(-rows.nbytes % 16)])


@pytest.mark.parametrize("width", [4, 3])
def test_rows_of_all_servers_come_together(width: int):
    out = torch.zeros(4, width)
    plan, wanted = asked(width, [9, 4, 9, 2], out)
    incoming = IncomingRows.of(plan, [wanted])
    assert [incoming.counts(server) for server in incoming.servers] == [[2], [1]]
    for _ in range(2):  # an answer may be taken twice
        incoming.take(plan.parcels[0], reply([2, 4], width))
        assert not out.any()
    incoming.take(plan.parcels[1], reply([9], width))
    assert out[:, 0].tolist() == [9, 4, 9, 2]


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda width: reply([2], width),
        lambda width: wire.Rows(1, [2], buffers=[bytes(16)]),
        lambda width: wire.Rows(1, [2], buffers=[]),
        lambda width: wire.Rows(1, [2, 0], buffers=reply([2, 4], width).buffers),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(width: int, wrong: Any):
    out = torch.zeros(2, width)
    plan, wanted = asked(width, [2, 4], out)
    with pytest.raises(WireError, match="expected"):
        IncomingRows.of(plan, [wanted]).take(plan.parcels[0], wrong(width))
    assert not out.any()


def test_where_no_rows_are_wanted_one_server_is_asked_all_the_same():
    plan, wanted = asked(4, [], torch.zeros(0, 4))
    incoming = IncomingRows.of(plan, [wanted])
    assert incoming.servers == [0]
    incoming.take(plan.parcels[0], wire.Rows(1, [0], buffers=[b""]))


def test_the_rows_of_a_round_are_united():
    out = RowSparse.zeros((20, 4))
    plan, wanted = asked(4, None, out)
    union = UnionRows(plan, [wanted])
    for server, ids in ((1, [3, 5]), (0, [4])):
        of_server = reply(ids, 4)
        numbers = np.array(ids, np.int32).tobytes()
        with pytest.raises(WireError, match="expected"):
            union.take(
                plan.parcels[server], wire.Rows(1, of_server.counts, wide=False, buffers=[*of_server.buffers, b"x"])
            )
        union.take(
            plan.parcels[server], wire.Rows(1, of_server.counts, wide=False, buffers=[*of_server.buffers, numbers])
        )
    assert out.ids.tolist() == [3, 4, 5]
    assert out.rows[:, 0].tolist() == [3, 4, 5]
