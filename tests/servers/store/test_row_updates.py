"""What contributions do to rows: sums, steps, hyper-parameters, and values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Desk, Worker, optimized, text_of
from asking_rows import ask, pull_rows, push_rows, put_rows, rows_in, table_rows, with_tables

from kvstore import wire
from kvstore.errors import Mismatch, ServerError, WeightsInDoubt
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowUpdater
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import RowBatch
from kvstore.rule import Rule
from kvstore.table import MinCount, Table
from kvstore.transport.memory import SMALL, Heap
from servers.store.array_updates import Updates
from servers.store.buckets import Buckets
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.recording import Recording
from servers.store.rounds import Rounds
from servers.store.row_target import GroupContribution, RowTarget, TableGroup
from servers.store.tables.row_updates import RowAnswers, RowUpdates


def test_a_round_sums_each_row_over_all_workers_and_answers_with_the_rows_that_each_wants():
    desk, a, b = optimized(with_tables(), lr=1.0).and_workers()
    mine = push_rows(a, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [4, 9]})
    assert desk.ask(a, mine) == {}
    theirs = push_rows(b, {7: {4: (1, 1)}}, wanted={7: [1]})
    replies = desk.ask(b, theirs)
    assert rows_in(replies[0, mine.seq]) == [[[-4, -4], [0, 0]]]
    assert rows_in(replies[1, theirs.seq]) == [[[-1, -2]]]


def test_without_an_optimizer_the_sums_are_the_new_rows_and_other_rows_stay():
    desk, a, b = with_tables().and_workers()
    ask(desk, put_rows(a, 7, {1: (5, 5), 2: (6, 6)}))
    desk.ask(a, push_rows(a, {7: {1: (1, 2)}}))
    desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert table_rows(desk, [1, 2], clock=1) == [[2, 3], [6, 6]]


def test_bits_do_not_depend_on_the_order_of_arrival():
    def sums(order: tuple[int, ...]) -> Any:
        desk = with_tables(3)
        values = (0.1, 1e8, -1e8)
        for rank in order:
            worker = desk.workers[rank]
            desk.ask(worker, push_rows(worker, {7: {2: (values[rank], 0)}}))
        return table_rows(desk, [2], clock=1)

    assert (
        sums((0, 1, 2)) == sums((2, 1, 0)) == sums((1, 0, 2)) == [[float(np.float32(0.1) + np.float32(1e8)) - 1e8, 0]]
    )


def test_many_tables_in_a_message_have_the_bits_of_messages_of_their_own():
    described = {number: Table(dim=4, init="normal", admit=MinCount(number)) for number in (1, 2, 3)}

    def rows(together: bool) -> Any:
        desk = optimized(with_tables(2, tables=described), "adam", lr=0.1)
        for clock in (1, 2, 3):
            for worker in desk.workers:
                ids = [worker.rank + clock, 7, 8 + worker.rank]
                gradients = {
                    number: {each: (0.1 * each, clock, -1, 3) for each in ids[:number]} for number in described
                }
                lists = [gradients] if together else [{number: rows} for number, rows in gradients.items()]
                for each in lists:
                    desk.ask(worker, push_rows(worker, each, clock))
        (a, _) = desk.workers
        return rows_in(desk.reply(a, pull_rows(a, dict.fromkeys(described, range(10)))), width=4)

    assert rows(together=True) == rows(together=False)


def test_of_many_tables_in_a_message_the_one_whose_sum_is_not_finite_is_not_updated():
    desk = optimized(with_tables(1, tables={number: Table(dim=4) for number in (1, 2)}, finite=True), lr=1.0)
    (a,) = desk.workers
    push = push_rows(a, {1: {5: (1, 1, 1, 1)}, 2: {6: (1, 1, 1, float("inf"))}})
    assert "of 't2' by worker 0" in text_of(desk.reply(a, push), "NotFinite")
    assert rows_in(desk.reply(a, pull_rows(a, {1: [5], 2: [6]}, 1)), width=4) == [[[-1] * 4], [[0] * 4]]


def test_a_round_is_updated_with_the_rate_of_its_pushes():
    desk = optimized(with_tables(2), lr=1.0)
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, lr=0.25, rescale=2.0))
    assert table_rows(desk, [1], clock=1) == [[-1, -1]]
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-3, -3]]


def test_workers_that_disagree_on_the_rate_all_get_an_error_and_the_round_is_over():
    desk, a, b = optimized(with_tables(2), lr=1.0).and_workers()
    mine, theirs = push_rows(a, {7: {1: (1, 1)}}, lr=0.25), push_rows(b, {7: {1: (1, 1)}}, lr=0.5)
    desk.ask(a, mine)
    replies = desk.ask(b, theirs)
    assert [text_of(reply, "Mismatch") for reply in replies.values()] == [
        "workers disagree on the learning rate for the same round of 't7': 0.25 on worker 0, 0.5 on worker 1"
    ] * 2
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-2, -2]]


def test_in_async_stores_a_rate_holds_until_another_is_given():
    desk, a = optimized(with_tables(1, "async"), lr=1.0).and_workers()
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, lr=0.5))
    assert rows_in(desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 2, {7: [1]}))) == [[[-1, -1]]]


def test_async_needs_an_optimizer():
    desk, a = with_tables(1, "async").and_workers()
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 1)}})), "UsageError")
    assert text.startswith("a push to an async store needs an optimizer")


def test_check_finite_names_key_row_position_and_worker_and_every_worker_of_the_round_is_told():
    desk, a, b = optimized(with_tables(2, finite=True), lr=1.0).and_workers()
    mine = push_rows(a, {7: {1: (1, 1)}})
    desk.ask(a, mine)
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1), 3: (float("inf"), 0)}}))
    assert [text_of(reply, "NotFinite") for reply in replies.values()] == [
        "push 1 of 't7' by worker 1 has NaN or infinite elements in row 3 (position 1); no row of this update has been "
        "changed"
    ] * 2
    assert table_rows(desk, [1, 3], clock=1) == [[0, 0], [0, 0]]


@pytest.mark.parametrize("lr", [None, 2.0**-16])
def test_a_sum_is_too_large_for_half_precision_where_it_becomes_the_value_alone(lr: float | None):
    desk = with_tables(2, finite=True, tables={7: Table(shape=(10, 2), dtype="float16")})
    desk, a, b = (desk if lr is None else optimized(desk, lr=lr)).and_workers()
    desk.ask(a, push_rows(a, {7: {3: (40_000, 1)}}, 1, {7: [3]}, dtype="float16"))
    replies = desk.ask(b, push_rows(b, {7: {3: (40_000, 1)}}, 1, {7: [3]}, dtype="float16"))
    for reply in replies.values():
        if lr is None:
            assert "each worker's rows are finite, their sum is not in float16" in text_of(reply, "NotFinite")
        else:
            assert rows_in(reply, dtype="float16") == [[[-1.220703125, -(2.0**-15)]]]


def test_a_sum_that_overflows_is_not_finite_either():
    desk, a, b = with_tables(2, finite=True).and_workers()
    desk.ask(a, push_rows(a, {7: {1: (3e38, 1)}}))
    replies = desk.ask(b, push_rows(b, {7: {1: (3e38, 1)}}))
    assert all("their sum is not in float32" in text_of(reply, "NotFinite") for reply in replies.values())


class Broken:
    """In place of an optimizer on rows: it fails before, or after, it has changed something."""

    lazy = True
    rule, states = "broken", {}

    def step(self, *_: Any) -> None:
        raise RuntimeError("no")


def test_if_the_optimizer_fails_before_a_row_has_changed_the_round_is_over_with_an_error():
    desk, a, b = with_tables(2).and_workers()
    target = desk.shard.stores[0].buckets.table(7)
    target.use(Broken())  # type: ignore[arg-type]
    desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert [text_of(reply, "ServerError") for reply in replies.values()] == [
        "RuntimeError: no; no row of this update of 't7' has changed"
    ] * 2
    target.use(None)
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[2, 2]]


def test_if_it_fails_in_the_middle_of_all_rows_that_table_is_not_served_any_more():
    desk, a = with_tables(1).and_workers()
    broken = Broken()
    broken.lazy = False
    desk.shard.stores[0].buckets.table(7).use(broken)  # type: ignore[arg-type]
    replies = desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    (text,) = [text_of(reply, "WeightsInDoubt") for reply in replies.values()]
    assert text.startswith("an update of 't7' failed in the middle, and may be half made: RuntimeError: no; no push")
    desk.shard.stores[0].buckets.table(7).use(None)
    for asked in (push_rows(a, {7: {1: (1, 1)}}, 2), pull_rows(a, {7: [1]}, 1)):
        assert text_of(desk.reply(a, asked), "WeightsInDoubt") == text


SGD = describe("sgd", {"learning_rate": 1.0})


@pytest.fixture
def group() -> TableGroup:
    targets = [RowTarget(n, f"t{n}", Table(shape=(9, 4)), 0, 1, Rounds([0, 1, 2])) for n in (7, 8)]
    for target in targets:
        target.use(RowUpdater(SGD, target.key, "float32", 4, grows=False))
    return TableGroup(targets)


@pytest.fixture
def updates() -> RowUpdates:
    rule, recording = Rule("sync"), Recording()
    buckets = Buckets(lambda: Rounds([0, 1, 2]), Heap(), recording)
    arrays = Updates(rule, buckets, Heap(), recording)
    return RowUpdates(rule, buckets, arrays.row_hyperparameters, recording, Heap())


def items(*ids: int, lr: Any = None) -> list[GroupContribution]:
    """Of each worker a row of ones, of the second table."""
    return [
        GroupContribution(
            [rank],
            1,
            RowBatch(np.array([each]), np.ones((1, 4), np.float32), [0, 0, 1]),
            UpdateHyperparameters(lr and lr * (rank + 1)),
            None,
        )
        for rank, each in enumerate(ids)
    ]


def rows(group: TableGroup, *ids: int) -> list[float]:
    out = np.empty((len(ids), 4), np.float32)
    group.tables[1].pull(np.array(ids), out)
    found: list[float] = out[:, 0].tolist()
    return found


@pytest.mark.parametrize(("ids", "expected"), [((2, 5), [-1, -1]), ((2, 2), [-2, 0]), ((5, 2, 2), [-2, -1])])
def test_rows_that_are_there_or_made_are_stepped_with_the_sum(
    group: TableGroup, updates: RowUpdates, ids: tuple[int, ...], expected: list[float]
) -> None:
    assert updates.close_group(group, items(*ids)) is None
    assert rows(group, 2, 5) == expected
    assert updates.close_group(group, items(*ids)) is None
    assert rows(group, 2, 5) == [2 * each for each in expected]
    assert [(table.version, table.steps) for table in group.tables] == [(2, 2)] * 2


def test_workers_that_disagree_change_nothing(group: TableGroup, updates: RowUpdates) -> None:
    error = updates.close_group(group, items(2, 5, lr=0.5))
    assert isinstance(error, Mismatch)
    assert "for the same round of 't7'" in str(error)
    assert [table.version for table in group.tables] == [0, 0]


def test_an_update_that_fails_says_whether_rows_have_changed(
    group: TableGroup, updates: RowUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert updates.close_group(group, items(2, 2)) is None

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.optim.updater.RowUpdater.step", failing)
        error = updates.close_group(group, items(2, 2))
    assert isinstance(error, ServerError)
    assert "no row of this update of 't7', 't8' has changed" in str(error)
    assert rows(group, 2) == [-2]
    monkeypatch.setattr("kvstore.rows.row_table.scatter", failing)
    error = updates.close_group(group, items(2, 2))
    assert isinstance(error, WeightsInDoubt)
    assert "an update of 't7', 't8' failed in the middle" in str(error)
    monkeypatch.undo()
    assert str(updates.close_group(group, items(2, 2))) == str(error)


FIRST, SECOND = (wire.Node("worker", 0, 1), 3), (wire.Node("worker", 1, 1), 3)


def test_rows_are_taken_once_and_while_their_tables_are_as_they_were() -> None:
    answers, table = RowAnswers(Heap()), RowTable(Table(dim=2))
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    answers.keep([FIRST, None], [rows, rows], [table])
    taken = answers.take(FIRST)
    assert taken is not None
    assert bytes(taken) == rows.tobytes()
    assert answers.take(FIRST) is None
    answers.keep([FIRST, SECOND], [rows, rows], [table])
    table.update(np.array([1]), rows[:1].copy(), None)
    assert answers.take(FIRST) is None, "the table has changed"
    answers.keep([SECOND], [rows], [table])
    answers.forget()
    assert answers.take(SECOND) is None


def test_the_rows_of_answers_are_in_memory_that_is_sent() -> None:
    asked: list[int] = []

    class Noting(Heap):
        def allocate(self, nbytes: int) -> memoryview:
            asked.append(nbytes)
            return super().allocate(nbytes)

    answers = RowAnswers(Noting())
    for request, count in ((FIRST, SMALL // 16), (FIRST, 2), (None, SMALL // 16)):
        rows = answers.room(request)((count, 4), np.dtype(np.float32))
        assert (rows.shape, rows.dtype) == ((count, 4), np.float32)
    assert asked == [SMALL]


TABLES = {number: Table(shape=(90, 4), init="constant") for number in (7, 8)}


def _desk(mode: str = "sync") -> Desk:
    desk = optimized(with_tables(2, mode, tables=TABLES), lr=1.0)
    for clock, ids in ((1, range(90)), (2, ())):
        for worker in desk.workers:
            desk.ask(worker, push_rows(worker, {n: dict.fromkeys(ids, (0, 0, 0, 0)) for n in TABLES}, clock))
    return desk


def _grads(worker: Worker) -> dict[int, dict[int, tuple[int, ...]]]:
    first = 20 * worker.rank
    return {n: {each: (n, worker.rank, each, 1) for each in range(first + n, first + n + 24)} for n in TABLES}


def _pushed(worker: Worker, grads: Any) -> Any:
    return push_rows(worker, grads, 3, {number: list(rows) for number, rows in grads.items()})


def _pulled(desk: Desk, grads: Any) -> list[Any]:
    (a, _) = desk.workers
    return rows_in(desk.reply(a, pull_rows(a, {number: list(rows) for number, rows in grads.items()}, 3)), 4)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []

    class Noting(RowAnswers):
        def take(self, request: Any) -> Any:
            answer = super().take(request)
            found.append(answer is not None)
            return answer

    monkeypatch.setattr("servers.store.tables.row_updates.RowAnswers", Noting)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_wants_what_it_has_pushed_gets_it_from_the_update(taken: list[bool], mode: str) -> None:
    desk, a, b = _desk(mode).and_workers()
    mine, theirs = _grads(a), _grads(b)
    early, late = _pushed(a, mine), _pushed(b, theirs)
    replies = desk.ask(a, early) | desk.ask(b, late)
    assert taken == [True, True]
    assert rows_in(replies[b.name, late.seq], 4) == _pulled(desk, theirs)
    if mode == "sync":
        assert rows_in(replies[a.name, early.seq], 4) == _pulled(desk, mine)


def test_a_message_whose_tables_rounds_close_apart_is_answered_whole(taken: list[bool]) -> None:
    desk, a, b = _desk().and_workers()
    mine, theirs = _grads(a), _grads(b)
    whole, *apart = _pushed(a, mine), *(_pushed(b, {number: rows}) for number, rows in theirs.items())
    replies = desk.ask(a, whole) | desk.ask(b, apart[0]) | desk.ask(b, apart[1])
    assert sorted(taken) == [False, True, True], "that of two tables is gathered"
    assert rows_in(replies[a.name, whole.seq], 4) == _pulled(desk, mine)
    assert rows_in(replies[b.name, apart[1].seq], 4) == _pulled(desk, {8: theirs[8]})


def test_a_server_that_follows_another_keeps_no_answers() -> None:
    desk = _desk("async")
    a = desk.workers[0]
    message = _pushed(a, _grads(a))
    served = desk.shard.stores[0]
    assert served.follow_push(message) is None
    assert served.tables.updates.answers.take(message.sender[:2]) is None
