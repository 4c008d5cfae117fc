"""Pushes of several tables as a group are taken as others are: same answers, same rows, same errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from asking import Desk, Worker, floats, sent, text_of
from asking_rows import describe, evict, freeze, init_tables, pull_rows, push_rows, put_rows, rows_in
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Records

from kvstore import wire
from kvstore.table import MinCount, Table, Unseen
from servers.store.row_target import TableGroups
from servers.store.served_store import ServedStore

LISTS = [(7, 8, 9)] * 21 + [(7, 8), (9,), (9, 8, 7)]


WIDTH = 4
KINDS = {
    "fixed": {number: Table(shape=(20 + number, WIDTH), init="normal") for number in (7, 8, 9)},
    "growing": {number: Table(dim=WIDTH, init="normal") for number in (7, 8, 9)},
    "admitting": {number: Table(dim=WIDTH, admit=MinCount(2)) for number in (7, 8, 9)},
    "evicting": {number: Table(dim=WIDTH, evict=Unseen(2)) for number in (7, 8, 9)},
    "mixed": {7: Table(dim=WIDTH), 8: Table(shape=(28, WIDTH)), 9: Table(shape=(29, WIDTH), codec="fp16")},
}


class Pair:
    """Two servers that get the same messages; one of them has no groups.

    Attributes:
        taken: how many pushes the other has taken as groups.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str = "fixed", mode: str = "sync", workers: int = 2, **rule: Any
    ) -> None:
        self.shards = [Desk(workers, mode, **rule).shard for _ in range(2)]
        self.workers = [Worker(rank) for rank in range(workers)]
        self.taken, self._plain = 0, False
        take, learn = ServedStore.push_to_group, TableGroups.learn

        def counted(served: ServedStore, peer: bytes, message: wire.PushRows) -> Any:
            answers = None if self._plain else take(served, peer, message)
            self.taken += answers is not None
            return answers

        def learned(groups: TableGroups, targets: Any) -> None:
            if not self._plain:
                learn(groups, targets)

        monkeypatch.setattr(ServedStore, "push_to_group", counted)
        monkeypatch.setattr(TableGroups, "learn", learned)
        for worker in self.workers:
            worker.seq = 10
        stripes = 2 if kind == "fixed" else 1
        self.say(self.workers[0], init_tables(self.workers[0], KINDS[kind], 0, stripes))

    def say(self, worker: Worker, message: wire.Message) -> Any:
        """Give ``message`` to both, and compare what they answer and hold; return the answers of the second."""
        outs = []
        for shard in self.shards:
            self._plain = shard is self.shards[1]
            outs.append(shard.handle(worker.peer, sent(message)))
        first, second = ([(peer, list(map(bytes, wire.encode(reply)))) for peer, reply in out] for out in outs)
        assert first == second
        one, other = (shard.stores[0] for shard in self.shards)
        assert [request.sender for request in one.parked] == [request.sender for request in other.parked]
        assert _rows(one) == _rows(other)
        return dict(outs[1])

    def depart(self, ranks: list[int]) -> None:
        first, second = (shard.depart(ranks) for shard in self.shards)
        assert first == second

    def compare(self) -> None:
        """Compare all that the two hold. It takes tables out of their groups."""
        one, other = (shard.stores[0] for shard in self.shards)
        assert _held(one) == _held(other)


def _rows(served: ServedStore) -> list[Any]:
    found: list[Any] = []
    for target in served.buckets.read_tables():
        frozen = target.table.freeze()
        ids, rows, parts = frozen.page(0, frozen.slots)
        frozen.thaw()
        arrays = [ids, rows, *parts.values(), *target.table.rest().values()]
        found += [(target.key, target.table.version, target.table.steps, [array.tobytes() for array in arrays])]
    return found


def _held(served: ServedStore) -> list[Any]:
    return [
        (
            target.key,
            target.rounds.state,
            target.rounds.version,
            [
                (clock, ranks, item.clock, item.ids.tolist(), item.rows.tobytes(), item.hyper, item.request)
                for clock, ranks, item in target.rounds.open()
            ],
            [(clock, parked.request.sender, parked.left, parked.late) for clock, parked in target.parked],
            {version: ids.tolist() for version, ids in target.changed.items()},
            (target.judged, target.last_at),
        )
        for target in served.buckets.tables
    ]


def spoiled(message: wire.PushRows, how: int) -> wire.PushRows:
    ids, rows, wanted = (bytearray(buffer) for buffer in message.buffers)
    changed: dict[str, Any] = {}
    if how == 0:
        ids[:4] = (1).to_bytes(4, "little")  # of another stripe
    elif how == 1:
        ids[-4:] = (10_000).to_bytes(4, "little")
    elif how == 2:
        ids[:8] = bytes(ids[4:8] + ids[:4])
    elif how == 3:
        rows[-4:] = np.float32(np.nan).tobytes()
    elif how == 4:
        rows += bytes(16)
    elif how == 5:
        wanted[:4] = (-2).to_bytes(4, "little", signed=True)
    elif how == 6:
        changed["codecs"] = ["fp16"] * len(message.ids)
    elif how == 7:
        changed["clocks"] = [*message.clocks[:-1], message.clocks[-1] + 1]
    elif how == 8:
        changed["changes"] = [[0, "momentum", 0.5]]
    elif how == 9:
        changed["union"] = True
    elif how == 10:
        changed["counts"] = message.counts[::-1]
    else:
        changed["want"] = False
    return wire.PushRows(**{**vars(message), "buffers": [ids, rows, wanted], **changed})


def push_rounds(pair: Pair, clocks: range, listed: tuple[int, ...] = (7, 8, 9)) -> None:
    for clock, worker in itertools.product(clocks, pair.workers):
        grads = {number: {2: (1, 0, 0, 0), 4 + 2 * worker.rank: (0, 1, 0, 0)} for number in listed}
        pair.say(worker, push_rows(worker, grads, clock, {number: list(rows) for number, rows in grads.items()}))


def _gradients(draws: np.random.Generator, listed: tuple[int, ...], most: int, kind: str) -> Any:
    """Random rows of even ids for each table, perhaps none."""
    tops = [table.rows or 27 for table in KINDS[kind].values()]
    return {
        number: {
            int(each): tuple(draws.integers(-3, 4, WIDTH))
            for each in np.unique(draws.integers(0, tops[number - 7] // 2, draws.integers(0, most + 1)) * 2)
        }
        for number in listed
    }


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What members do, most often pushes of the same tables in rounds."""
    kind = st.sampled_from(["round"] * 8 + ["push"] * 4 + ["odd"] * 4 + ["pull", "other", "optimizer", "compare"])
    rare = st.sampled_from(["pause", "depart"])
    count = draw(st.integers(4, 14))
    return [
        (draw(rare if step > 11 else kind), draw(st.integers(0, 2)), draw(st.integers(0, 23))) for step in range(count)
    ]


@settings(max_examples=25, deadline=None)
@given(
    runs(),
    st.sampled_from(["fixed"] * 4 + ["growing"] * 3 + ["admitting", "evicting", "mixed"]),
    st.sampled_from(["sync", "sync", "async"]),
    st.sampled_from([2, 2, 3]),
    st.sampled_from([False] * 4 + [True]),
    st.integers(0, 99),
)
def test_any_run_is_the_same_with_and_without_groups(
    run: list[tuple[str, int, int]], kind: str, mode: str, workers: int, unusual: bool, seed: int
) -> None:
    draws, numbers = np.random.default_rng(seed), itertools.count(2)
    rule = {"finite": True} if unusual and mode == "sync" else {"staleness": 1} if unusual else {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        pair = Pair(monkeypatch, kind, mode, workers, **rule)
        for worker in pair.workers:
            pair.say(worker, worker.set_optimizer("adam" if seed % 2 else "sgd", lr=0.5))
        push_rounds(pair, range(1, 3))
        clock = 3
        for what, who, extra in run:
            worker, listed = pair.workers[who % workers], LISTS[extra]

            def push(member: Worker, at: int, listed: tuple[int, ...] = listed, extra: int = extra, **o: Any) -> Any:
                grads = _gradients(draws, listed, 4 if extra % 3 else 14, kind)
                own = {number: list(rows) for number, rows in grads.items()}
                others = {number: list(rows) for number, rows in _gradients(draws, listed, 4, kind).items()}
                return push_rows(member, grads, at, [own, own, others, {}][extra % 4], wide=extra == 20, **o)

            if what == "round":
                for member in pair.workers if extra % 2 else pair.workers[::-1]:
                    pair.say(member, push(member, clock))
                clock += 1
            elif what == "push":
                pair.say(worker, push(worker, clock + extra // 16, lr=0.25 if extra == 5 else None))
            elif what == "odd":
                message = push(worker, clock, LISTS[0], 4 + 8 * (extra % 3 > 1) + (extra % 2) * 2)
                if len(message.buffers[0]) >= 8 and len(message.buffers[2]) >= 4:
                    pair.say(worker, spoiled(message, extra % 12))
            elif what == "pull":
                wanted = {number: list(rows) for number, rows in _gradients(draws, listed, 9, kind).items()}
                pair.say(worker, pull_rows(worker, wanted, clock - extra % 2))
            elif what == "other":
                first = pair.workers[0]
                asked = [
                    describe(first, 8),
                    evict(first, 8, clock - 1),
                    freeze(first, 7, clock - 1),
                    put_rows(first, 9, {4: (9, 9, 9, 9)}),
                ]
                pair.say(first, asked[extra % 4])
            elif what == "optimizer":
                version = next(numbers)
                for member in pair.workers:
                    pair.say(member, member.set_optimizer(lr=0.5, version=version, momentum=(extra % 3) / 4))
            elif what == "compare":
                pair.compare()
            elif what == "pause":
                pair.say(worker, worker.pause(dict.fromkeys(KINDS[kind], clock - 1)))
            else:
                pair.depart([who % workers])
        pair.compare()


def _grouped(monkeypatch: pytest.MonkeyPatch, **rule: Any) -> Pair:
    pair = Pair(monkeypatch, **rule)
    for worker in pair.workers:
        pair.say(worker, worker.set_optimizer(lr=0.5))
    push_rounds(pair, range(1, 3))
    return pair


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_rounds_but_the_first_are_taken_as_those_of_a_group(
    monkeypatch: pytest.MonkeyPatch, mode: str, workers: int
) -> None:
    pair = Pair(monkeypatch, mode=mode, workers=workers)
    for worker in pair.workers:
        pair.say(worker, worker.set_optimizer(lr=0.5))
    push_rounds(pair, range(1, 4))
    assert pair.taken >= 2 * workers
    pair.compare()
    push_rounds(pair, range(4, 6))
    assert pair.taken >= 3 * workers, "they are a group again"


def test_a_table_by_itself_leaves_its_group_with_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch)
    a, b = pair.workers
    grads = {number: {2: (1, 1, 1, 1)} for number in (7, 8, 9)}
    pair.say(a, push_rows(a, grads, 3, {7: [2]}))
    for number in grads:  # each alone
        answers = pair.say(b, push_rows(b, {number: grads[number]}, 3, {number: [2]}))
        assert len(answers) == (2 if number == 9 else 1), "the first waits for all three"
    pair.compare()


def test_tables_whose_lists_change_are_in_no_group_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    for worker in pair.workers:
        pair.say(worker, worker.set_optimizer(lr=0.5))
    for clock in range(1, 13):
        push_rounds(pair, range(clock, clock + 1), [(7, 8), (8, 7)][clock % 2])
    before = pair.taken
    push_rounds(pair, range(13, 16), (7, 8))
    assert pair.taken == before


def test_workers_that_disagree_are_told_of_it_and_the_round_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch)
    a, b = pair.workers
    grads = {number: {2: (1, 1, 1, 1)} for number in (7, 8, 9)}
    pair.say(a, push_rows(a, grads, 3, {7: [2]}, lr=0.1))
    answers = pair.say(b, push_rows(b, grads, 3, {7: [2]}, lr=0.2))
    assert "workers disagree on the learning rate" in text_of(answers[a.peer], "Mismatch")
    push_rounds(pair, range(4, 5))
    pair.compare()


def test_an_optimizer_that_fails_leaves_the_rows_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch)
    with monkeypatch.context() as patched:

        def failing(*_: Any, **__: Any) -> None:
            raise MemoryError("no room")

        patched.setattr("kvstore.optim.updater.RowUpdater.step", failing)
        push_rounds(pair, range(3, 4))
    push_rounds(pair, range(4, 5))
    pair.compare()
    assert pair.taken == 6


def test_arrays_do_not_mind_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch)
    a = pair.workers[0]
    pair.say(a, a.init({3: floats(1, 2)}))
    pair.say(a, pull_rows(a, {9: [2], 7: [4]}, 2))
    answers = pair.say(a, pull_rows(a, {7: [2], 8: [4], 9: [6]}, 2))
    assert len(rows_in(answers[a.peer], WIDTH)) == 3
    push_rounds(pair, range(3, 4))
    assert pair.taken == 4


def test_a_table_that_outgrows_the_memory_of_all_is_still_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("slab_space", "slabs"):
        monkeypatch.setattr(f"kvstore.rows.{module}.RESERVED", 8 * 4 * WIDTH)
    pair = _grouped(monkeypatch, kind="growing")
    a, b = pair.workers
    for clock, worker in itertools.product(range(3, 6), (a, b)):
        some = list(range(10 * (clock - 2)))
        grads = {number: dict.fromkeys(some, (1, 2, 3, clock)) for number in (7, 8, 9)}
        pair.say(worker, push_rows(worker, grads, clock, {7: some[:4], 8: some, 9: ()}))
    pair.compare()
    assert pair.taken >= 6


# ---- what is left to the other way


def _push(worker: Worker, clock: int, value: float = 1.0) -> wire.PushRows:
    grads = {number: {2 * each: (value,) * WIDTH for each in range(number - 5)} for number in (7, 8, 9)}
    return push_rows(worker, grads, clock, {number: list(rows) for number, rows in grads.items()})


@pytest.mark.parametrize("how", range(12))
def test_a_push_with_something_unusual_has_its_effect_or_its_error(monkeypatch: pytest.MonkeyPatch, how: int) -> None:
    pair = _grouped(monkeypatch)
    taken = pair.taken
    pair.say(pair.workers[0], spoiled(_push(pair.workers[0], 3), how))
    assert pair.taken == taken + (how == 11), "only to want nothing is usual"
    pair.compare()
    push_rounds(pair, range(4, 5))
    pair.compare()


def test_a_push_that_would_wait_for_who_has_left_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch, workers=3)
    a, b, _ = pair.workers
    pair.say(a, _push(a, 3))
    pair.depart([2])
    pair.say(b, _push(b, 3))
    pair.say(a, _push(a, 4))
    pair.compare()


@pytest.mark.parametrize("paused", [(7, 8, 9), (8,)])
def test_a_push_that_would_wait_for_who_is_inside_join_resumes(
    monkeypatch: pytest.MonkeyPatch, paused: tuple[int, ...]
) -> None:
    pair = _grouped(monkeypatch)
    a, b = pair.workers
    pair.say(b, b.pause(dict.fromkeys(paused, 2)))
    pair.say(a, _push(a, 3))
    pair.say(a, _push(a, 4))
    pair.compare()


def test_a_sum_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch, finite=True)
    a, b = pair.workers
    pair.say(a, _push(a, 3, 3e38))
    answers = pair.say(b, _push(b, 3, 3e38))
    text_of(answers[a.peer], "NotFinite")
    assert pair.taken == 0


def test_a_standby_is_told_of_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _grouped(monkeypatch)
    records = [Records(), Records()]
    for shard, its in zip(pair.shards, records, strict=True):
        shard.record(its)
    push_rounds(pair, range(3, 5))
    first, second = ([list(map(bytes, wire.encode(record))) for record in its] for its in records)
    assert first == second != []


@pytest.mark.parametrize("clock", [2, 3, 4])
def test_a_checkpoint_has_each_table_at_its_round(monkeypatch: pytest.MonkeyPatch, clock: int) -> None:
    pair = _grouped(monkeypatch)
    a, b = pair.workers
    saved: list[Any] = []
    for shard in pair.shards:
        shard.checkpoints.save = saved.append
    pair.say(a, _push(a, 3))
    pair.say(a, wire.Capture(a.me(), 0, 5, [7, 8, 9], [clock] * 3))
    pair.say(b, _push(b, 3))
    push_rounds(pair, range(4, 6))
    first, second = ((capture.headers, list(map(bytes, capture.contents()))) for capture in saved)
    assert first == second
