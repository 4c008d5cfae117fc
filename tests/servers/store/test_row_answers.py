"""Answers that an update has made: the rows that were pushed, as they are after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Desk, Worker, optimized
from asking_rows import pull_rows, push_rows, rows_in, with_tables

from kvstore import wire
from kvstore.rows.row_table import RowTable
from kvstore.table import Table
from kvstore.transport.memory import SMALL, Heap
from servers.store.row_updates import RowAnswers

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
    """Two workers, and tables all of whose rows have been made, at round 2."""
    desk = with_tables(2, mode, tables=TABLES)
    optimized(desk, lr=1.0)
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

    monkeypatch.setattr("servers.store.row_updates.RowAnswers", Noting)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_wants_what_it_has_pushed_gets_it_from_the_update(taken: list[bool], mode: str) -> None:
    desk = _desk(mode)
    a, b = desk.workers
    mine, theirs = _grads(a), _grads(b)
    early, late = _pushed(a, mine), _pushed(b, theirs)
    replies = desk.ask(a, early) | desk.ask(b, late)
    assert taken == [True, True]
    assert rows_in(replies[b.name, late.seq], 4) == _pulled(desk, theirs)
    if mode == "sync":
        assert rows_in(replies[a.name, early.seq], 4) == _pulled(desk, mine)


def test_a_message_whose_tables_rounds_close_apart_is_answered_whole(taken: list[bool]) -> None:
    desk = _desk()
    a, b = desk.workers
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
