"""What a worker says about a store: messages, barriers, pauses, states, whole tables; and what follows the answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_worker import every_worker_of
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for
from played_session import AGGREGATOR, SCHEDULER, PlayedSession
from played_tables import PlayedTables
from threaded import ThreadedJob

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.entries import Entries, PushClocks
from kvstore.client.plans import Plan, RowPlan, parcels
from kvstore.client.requests import Joining, Requests, WorkerBarriers, assemble, cut
from kvstore.client.stored_tables import StoredRows, StoredTables
from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.optim.optimizer import describe
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.table import MinCount, Table, TableSpec
from kvstore.ticket import Operation, WaitLimits
from kvstore.values import Leaving, from_buffer, to_buffer

SPECS: dict[Key, Spec] = {"cut": Spec((6,), "float32"), "w": Spec((2,), "float32")}


def made(session: PlayedSession, rule: Rule | None = None) -> Requests:
    requests = Requests(session, 3, rule or Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    del session.asked[: 1 + len(session.servers)]
    return requests


def kinds(session: PlayedSession) -> list[tuple[bytes, type]]:
    return [(peer, type(message)) for peer, message in session.asked]


def test_a_store_is_opened_with_the_scheduler_and_then_on_all_servers() -> None:
    session = PlayedSession()
    requests = Requests(session, 3, Rule("async", staleness=2), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    assert kinds(session) == [(SCHEDULER, wire.OpenStore), (b"server 0", wire.Open), (b"server 1", wire.Open)]
    assert session.asked[0][1].ordinal == 3
    assert requests.store == 7
    assert {(message.store, message.mode, message.staleness) for _, message in session.asked[1:]} == {(7, "async", 2)}


def test_an_aggregator_opens_the_store_too_and_closes_it() -> None:
    session = PlayedSession(aggregator=True)
    requests = Requests(session, 3, Rule("async", aggregate="host"), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    assert [peer for peer, message in session.asked if isinstance(message, wire.Open)] == [*session.servers, AGGREGATOR]
    assert {message.aggregate for _, message in session.asked[1:]} == {"host"}
    session.asked.clear()
    requests.close()
    assert kinds(session) == [
        (b"server 0", wire.Close),
        (b"server 1", wire.Close),
        (AGGREGATOR, wire.Close),
        (SCHEDULER, wire.CloseStore),
    ]


def test_it_is_closed_the_other_way_round() -> None:
    session = PlayedSession()
    made(session).close()
    assert kinds(session) == [(b"server 0", wire.Close), (b"server 1", wire.Close), (SCHEDULER, wire.CloseStore)]


def test_keys_are_where_the_scheduler_says() -> None:
    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Declare):
            return wire.Placed(request.seq, [2, 1], [4, 5, 6], [0, 1, 0], [0, 3, 0], [3, 6, 2])
        return wire.Ack(request.seq)

    session = PlayedSession(answer=answer)
    entries, _ = made(session).declare(["cut", "w"], [0, 1], list(SPECS.values()), 5, 100)
    ((_, message),) = session.asked
    assert (message.keys, message.shapes, message.bound, message.longest) == (["cut", "w"], [[6], [2]], 5, 100)
    assert [(s.id, s.server, s.start, s.stop) for s in entries["cut"].segments] == [(4, 0, 0, 3), (5, 1, 3, 6)]
    assert entries["w"].spec == SPECS["w"]


def test_first_values_are_on_the_servers_before_the_scheduler_hears_of_them() -> None:
    def note() -> None:
        assert kinds(session) == [(b"server 0", wire.Init), (b"server 1", wire.Init)]
        notes.append("ready")

    session, notes = PlayedSession(), []
    plan = Plan(entries_for(SPECS, servers=2, bound=5), list(SPECS), 1 << 20)
    requests = made(session)
    requests.put_values(plan, Leaving([torch.arange(6.0), torch.tensor([8.0, 9.0])]))
    requests.ready(plan.keys, note)
    assert kinds(session)[-1] == (SCHEDULER, wire.Ready)
    assert session.asked[-1][1].keys == ["cut", "w"]
    assert notes == ["ready"]
    sent = torch.cat(
        [from_buffer(buffer, "float32") for _, message in session.asked[:-1] for buffer in message.buffers]
    )
    assert sorted(sent.tolist()) == [0, 1, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("silent", [None, b"server 0", b"server 1"])
def test_an_optimizer_is_set_when_all_servers_have_answered(silent: bytes | None) -> None:
    def answer(peer: bytes, request: wire.Request) -> wire.Reply | None:
        return None if peer == silent and isinstance(request, wire.SetOptimizer) else wire.Ack(request.seq)

    def note() -> None:
        notes.append("set")

    session, notes = PlayedSession(answer=answer), []
    requests = made(session)
    description = describe("sgd", {"lr": 0.5, "momentum": 0.9, "lr_mult": {"w": 2.0}})
    if silent is None:
        requests.set_optimizer(1, description, note)
    else:
        with pytest.raises(AssertionError):  # it would wait
            requests.set_optimizer(1, description, note)
    assert notes == (["set"] if silent is None else [])
    message = session.asked[0][1]
    assert (message.version, message.name, message.lr) == (1, "sgd", 0.5)
    assert (message.hyper, message.lr_mult) == ([["momentum", 0.9]], [["w", 2.0]])


def test_states_go_out_and_come_back() -> None:
    stored: dict[tuple[int, str], torch.Tensor] = {}

    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.PutStates):
            parts = wire.unpack_arrays(request.buffers, [4 * shape[0] for shape in request.shapes])
            values = [from_buffer(part, "float32") for part in parts]
            stored.update(zip(zip(request.ids, request.names, strict=True), values, strict=True))
        if isinstance(request, wire.GetStates):
            names = [which for which in stored if which[0] in request.ids]
            return wire.OptimizerStates(
                request.seq,
                optimizer="sgd",
                ids=[number for number, _ in names],
                names=[name for _, name in names],
                shapes=[list(stored[which].shape) for which in names],
                dtypes=["float32"] * len(names),
                buffers=wire.pack_arrays([to_buffer(stored[which].clone()) for which in names]),
            )
        return wire.Ack(request.seq)

    requests = made(PlayedSession(answer=answer))
    entries = entries_for(SPECS, servers=2, bound=5)
    states = {
        (segment, "momentum_buffer"): torch.full((segment.stop - segment.start,), float(segment.id))
        for key in SPECS
        for segment in entries[key].segments
    }
    read: dict[Any, torch.Tensor] = {}
    for parcel in parcels(entries, list(SPECS), 1 << 20):
        requests.put_states(parcel.server, {which: states[which] for which in states if which[0] in parcel.segments})
        read |= requests.get_states(parcel)
    assert read.keys() == states.keys()
    assert all(torch.equal(read[which], states[which]) for which in states)
    assert requests.optimizer() == "sgd"


def test_a_barrier_goes_on_after_its_call() -> None:
    session = PlayedSession(
        answer=lambda _, request: None if isinstance(request, wire.Barrier) else wire.Ack(request.seq)
    )
    barriers, waited = WorkerBarriers(made(session)), list[Operation]()
    session.client.wait = lambda operation, timeout: waited.append(operation)  # type: ignore[attr-defined]
    barriers.wait()
    assert [(peer, message.number) for peer, message in session.asked] == [(SCHEDULER, 1)]
    assert waited[0].open
    assert str(waited[0]) == "barrier"


def test_an_aggregator_is_told_where_keys_are() -> None:
    def answer(_: bytes, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Declare):
            return wire.Placed(request.seq, [2, 1], [4, 5, 6], [0, 1, 0], [0, 3, 0], [3, 6, 2])
        return wire.Ack(request.seq)

    session = PlayedSession(answer=answer, aggregator=True)
    requests = Requests(session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    session.asked.clear()
    requests.declare(["cut", "w"], [0, 1], list(SPECS.values()), 5, 100)
    assert kinds(session) == [(SCHEDULER, wire.Declare), (AGGREGATOR, wire.Describe)], "before anything can be pushed"
    told = session.asked[1][1]
    assert (told.keys, told.kinds, told.shapes, told.dtypes) == (["cut", "w"], [0, 1], [[6], [2]], ["float32"] * 2)
    assert (told.counts, told.ids, told.servers, told.sizes) == ([2, 1], [4, 5, 6], [0, 1, 0], [3, 3, 2])


def test_an_aggregator_hears_of_a_pause_of_all_segments() -> None:
    session = PlayedSession(
        answer=lambda peer, request: (
            wire.Resume(request.seq, 1, [5] * len(request.ids))
            if isinstance(request, wire.Pause) and peer != AGGREGATOR and peer != SCHEDULER
            else wire.Ack(request.seq)
        ),
        aggregator=True,
    )
    requests = Requests(session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
    session.asked.clear()
    entries = entries_for(SPECS, servers=2, bound=5)
    clocks = PushClocks()
    clocks.grow(len(SPECS))
    clocks.pushed[:] = 3
    joining = Joining(requests, clocks)
    joining.begin(entries)
    peers = [SCHEDULER, b"server 0", b"server 1", AGGREGATOR]
    assert kinds(session) == [(peer, wire.Pause) for peer in peers]
    messages = [message for _, message in session.asked[1:]]
    assert sorted(messages[2].ids) == sorted([*messages[0].ids, *messages[1].ids])
    assert (set(messages[2].clocks), messages[2].number, messages[2].pushes) == ({3}, 1, 3 * len(SPECS))
    assert joining.end(entries) == 1
    assert clocks.pushed.tolist() == [5] * len(SPECS), "the rounds are the servers' to tell"


class Coming:
    """A worker at barriers. What a wait raises is in ``waits``, first to last; None is that all have come."""

    def __init__(self, *waits: Exception | None) -> None:
        self.waits = list(waits)
        self.session = PlayedSession(answer=self._answer)
        self.session.client.wait = self._wait  # type: ignore[method-assign]
        self.barriers = WorkerBarriers(Requests(self.session, 1, Rule(), WaitLimits(1.0, 1.0)))  # type: ignore[arg-type]

    @property
    def asked(self) -> list[int]:
        """The numbers of the barriers that the scheduler has heard of."""
        return [
            message.number for peer, message in self.session.asked if (peer, type(message)) == (SCHEDULER, wire.Barrier)
        ]

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        return None if isinstance(request, wire.Barrier) else wire.Ack(request.seq)

    def _wait(self, operation: Operation, timeout: float | None) -> None:
        outcome = self.waits.pop(0)
        if outcome is not None:
            raise outcome
        operation.open.clear()


def test_each_barrier_has_the_next_number() -> None:
    coming = Coming(None, None)
    coming.barriers.wait()
    coming.barriers.wait()
    assert coming.asked == [1, 2]
    assert coming.barriers.passed == 2


def test_at_one_that_was_late_the_next_call_waits_on() -> None:
    coming = Coming(DeadlineExceeded("late"), None)
    with pytest.raises(DeadlineExceeded):
        coming.barriers.wait()
    assert coming.barriers.passed == 0
    coming.barriers.wait()
    assert coming.asked == [1]
    assert coming.barriers.passed == 1


def test_one_that_let_nobody_through_is_come_to_again() -> None:
    coming = Coming(None, UsageError("worker 1 has joined"), None)
    coming.barriers.wait()
    with pytest.raises(UsageError):
        coming.barriers.wait()
    coming.barriers.wait()
    assert coming.asked == [1, 2, 2]
    assert coming.barriers.passed == 2


def known() -> Entries:
    return entries_for({"cut": Spec((6,), "float32"), "w": Spec((2,), "float32")}, servers=2, bound=5)


class Rig:
    """A worker that has pushed "cut" three times and "w" five times; servers are at round 7 of everything."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.entries = known()
        self.clocks = PushClocks()
        self.clocks.grow(2)
        self.clocks.note(np.array([0, 1]), np.array([3, 5]), push=1)
        self.session = PlayedSession(answer=self._answer)
        requests = Requests(self.session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
        self.session.asked.clear()
        self.joining = Joining(requests, self.clocks)

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Pause) and peer != SCHEDULER:
            return wire.Resume(request.seq, 1, [7] * len(request.ids)) if self.answers else None
        return wire.Ack(request.seq)


def test_the_scheduler_hears_of_it_before_any_server() -> None:
    rig = Rig()
    rig.joining.begin(rig.entries)
    assert [peer for peer, _ in rig.session.asked] == [SCHEDULER, b"server 0", b"server 1"]
    assert {message.number for _, message in rig.session.asked} == {1}


def test_servers_get_the_clocks_of_their_segments() -> None:
    rig = Rig()
    rig.joining.begin(rig.entries)
    clocks = {number: clock for _, m in rig.session.asked[1:] for number, clock in zip(m.ids, m.clocks, strict=True)}
    assert clocks == {
        **{segment.id: 3 for segment in rig.entries["cut"].segments},
        **{segment.id: 5 for segment in rig.entries["w"].segments},
    }
    assert {message.pushes for _, message in rig.session.asked[1:]} == {8}


def test_the_next_push_follows_the_rounds_of_the_others() -> None:
    rig = Rig()
    assert not rig.joining.under_way
    rig.joining.begin(rig.entries)
    assert rig.joining.under_way
    rig.joining.wait(None)
    assert rig.joining.end(rig.entries) == 1
    assert not rig.joining.under_way
    assert rig.clocks.pushed[:2].tolist() == [7, 7]


def test_each_pause_has_a_number_of_its_own() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.session.asked.clear()
        rig.joining.begin(rig.entries)
        rig.joining.end(rig.entries)
        assert {message.number for _, message in rig.session.asked} == {number}


@pytest.mark.parametrize(("error", "under_way"), [(DeadlineExceeded("late"), True), (UsageError("no"), False)])
def test_a_pause_goes_on_after_a_late_call_and_is_over_once_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, under_way: bool
) -> None:
    def fail(operation: Operation, timeout: float | None) -> None:
        raise error

    rig = Rig(answers=False)
    rig.joining.begin(rig.entries)
    monkeypatch.setattr(rig.session.client, "wait", fail)
    with pytest.raises(type(error)):
        rig.joining.wait(0.5)
    assert rig.joining.under_way == under_way


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[where], two[where]) and one[where].dtype == two[where].dtype for where in one
    )


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 9), shapes, max_size=5), st.integers(1, 5), st.integers(1, 40))
def test_cut_and_assemble_are_inverses_for_any_placement(shapes: dict[Key, Any], servers: int, bound: int) -> None:
    specs = {key: Spec(shape, "float32") for key, shape in shapes.items()}
    entries = entries_for(specs, servers, bound)
    whole = {(key, "sum"): torch.randn(spec.shape) for key, spec in specs.items()}
    whole |= {(key, "step"): torch.tensor(float(len(spec.shape))) for key, spec in specs.items()}
    segments = cut(whole, entries)
    for (segment, name), value in segments.items():
        if name == "sum" and entries[segment.key].cut:
            assert value.shape == (segment.stop - segment.start,)
    assert same(assemble(segments, entries), whole)
    assert same(cut(assemble(segments, entries), entries_for(specs, 2, 3)), cut(whole, entries_for(specs, 2, 3)))


def test_state_that_is_not_element_by_element_cannot_be_cut() -> None:
    entries = entries_for({"w": Spec((4, 4), "float32")}, 2, 1)
    with pytest.raises(UsageError, match="row_var of key 'w' cannot be cut over 2 servers"):
        cut({("w", "row_var"): torch.ones(4, 1)}, entries)


def test_rows_are_put_in_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.client.stored_tables.PAGE", 100)
    played = PlayedTables(2)
    played.store.init("t", Table(shape=(40, 3)))
    played.store.put_rows("t", RowSparse(range(30), torch.arange(90.0).view(30, 3)))
    assert max(message.count for message in played.asked(wire.PutRows)) == 5
    found = played.store.row_sparse_pull("t", row_ids=range(30))
    assert torch.equal(found, torch.arange(90.0).view(30, 3))
    with pytest.raises(UsageError, match="id 3 comes twice"):
        played.store.put_rows("t", RowSparse([3, 3], torch.ones(2, 3)))


def test_what_belongs_to_a_row_goes_with_it():
    session: Any = PlayedSession(2)
    entries = entries_for({"t": TableSpec.of(Table(shape=(40, 2)))}, 2, 10)
    stored = StoredTables(Requests(session, 1, Rule(), WaitLimits(1.0, 1.0)), entries.tables)
    session.asked.clear()
    parts = {"seen": np.array([7, 8]), "state.m": np.ones((2, 2), np.float32)}
    given = StoredRows(np.array([2, 4]), np.ones((2, 2), np.float32), parts, version=9, steps=3)
    stored.put("load_table", RowPlan(entries, ["t"]), "t", given)
    first, second = (message for _, message in session.asked)
    assert (first.count, second.count) == (2, 0), "the other server hears of the version, too"
    for message in (first, second):
        assert (message.version, message.steps) == (9, 3)
        assert (message.names, message.dtypes, message.columns) == (["seen", "state.m"], ["int64", "float32"], [0, 2])


def test_statistics_are_of_all_servers_and_evictions_follow_the_last_push():
    played = PlayedTables(2)
    played.store.init("g", Table(dim=2))
    played.store.push("g", RowSparse([1], torch.ones(1, 2)))
    assert played.store.table_statistics("g") == {"rows": 21, "version": 6}
    played.store.evict("g")
    assert [(message.id, message.clock) for message in played.asked(wire.EvictRows)] == [(0, 1), (1, 1)]


@every_worker_of("cluster")
def test_whole_tables_are_read_replaced_and_counted(store: DistStore) -> None:
    store.init("t", Table(dim=2, admit=MinCount(2)))
    far = range(0, 3000, 3)
    store.put_rows("t", RowSparse(far, torch.arange(1000.0)[:, None].expand(1000, 2)))
    store.barrier()
    reading = store.table_rows("t")
    store.push("t", RowSparse([3, 2**50], torch.full((2, 2), 7.0)))
    store.barrier()
    pages = list(reading)
    ids, rows = torch.cat([page.ids for page in pages]), torch.cat([page.rows for page in pages])
    order = ids.argsort()
    assert ids[order].tolist() == list(far)
    assert torch.equal(rows[order][:, 1], torch.arange(1000.0))
    assert store.row_sparse_pull("t", row_ids=[3, 2**50, 6])[:, 0].tolist() == [14, 0, 2]
    counts = store.table_statistics("t")
    assert (counts["rows"], counts["version"], counts["refused"]) == (1000, 1, 1)
    store.evict("t")
    store.barrier()


def test_pages_are_small_and_a_reading_that_is_left_ends(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.stored_tables.READ_PAGE", 1000)

    def work(store: DistStore) -> None:
        store.init("t", Table(dim=2))
        store.push("t", RowSparse(range(500), torch.ones(500, 2)))
        for _ in range(6):  # a server keeps no more than four for a worker: the others have gone
            reading = store.table_rows("t")
            assert 0 < len(next(iter(reading))) <= 1000 // 16
            reading.close()
        assert sum(len(page) for page in store.table_rows("t")) == 500

    cluster.run(work)


def test_a_reading_that_outlives_the_job_ends_without_a_word() -> None:
    """As a generator whose loop an error has ended: it is closed after the worker has left."""

    def work(store: DistStore) -> Any:
        store.init("t", Table(dim=2))
        store.push("t", RowSparse(range(500), torch.ones(500, 2)))
        reading = store.table_rows("t")
        next(iter(reading))
        return reading

    with ThreadedJob(workers=1, servers=1) as job:
        (reading,) = job.run(work)
    reading.close()
