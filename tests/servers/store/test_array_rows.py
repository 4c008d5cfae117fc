"""Pushes that have some rows of an array: what comes is checked, and only these rows are updated."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, optimized, read, some_rows, text_of, updating
from pairs import Pair

from kvstore import wire
from kvstore.errors import WireError

ROWS = torch.arange(12.0).view(4, 3)


def rows(worker: Worker, of: dict[int, Any], clock: int = 1, number: int = 1, **others: Any) -> wire.Push:
    """A push of some rows of three elements of segment ``number``, which is an array."""
    return some_rows(worker.push({number: floats()}, clock, **others), [[1, 0, 3]], [of])


def desk(*args: Any, kind: Any = Desk, **rule: Any) -> Any:
    return kind(*args, values={1: ROWS.clone()}, **rule)


def test_without_an_optimizer_the_sum_is_the_value_and_other_rows_are_zeros():
    shop, a, b = desk(2).and_workers()
    shop.ask(a, rows(a, {1: [1, 1, 1]}))
    shop.ask(b, rows(b, {1: [2, 2, 2], 3: [4, 4, 4]}))
    assert shop.value(clock=1)[:, 0].tolist() == [0, 3, 0, 4]


def test_rows_without_a_gradient_neither_move_nor_decay():
    shop, a, b = optimized(desk(2), lr=1.0, weight_decay=0.5).and_workers()
    shop.ask(a, rows(a, {1: [1, 1, 1]}))
    shop.ask(b, rows(b, {}))
    expected = ROWS.clone()
    expected[1] -= 1 + 0.5 * ROWS[1]
    assert torch.equal(shop.value(clock=1), expected)


@pytest.mark.parametrize("optimizer", [("rmsprop", {}), ("sgd", {"momentum": 0.5, "lazy_update": False})])
def test_other_updates_are_those_of_a_gradient_with_zeros(optimizer: tuple[str, dict[str, Any]]):
    shops = [optimized(desk(1), optimizer[0], lr=0.5, weight_decay=0.5, **optimizer[1]) for _ in range(2)]
    dense = torch.zeros(4, 3)
    dense[2] = 1
    for clock in (1, 2):
        shops[0].ask(shops[0].workers[0], rows(shops[0].workers[0], {2: [1, 1, 1]}, clock))
        shops[1].ask(shops[1].workers[0], shops[1].workers[0].push({1: dense}, clock))
    assert torch.equal(shops[0].value(clock=2), shops[1].value(clock=2))


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_a_round_may_have_rows_of_one_worker_and_the_whole_array_of_another(name: str):
    """It updates all of it; rounds of rows alone go on with the same state."""
    shops = [optimized(desk(2), name, lr=0.5) for _ in range(2)]
    for shop, sparse in zip(shops, (True, False), strict=True):
        a, b = shop.workers
        dense = torch.zeros(4, 3)
        dense[1] = 2
        shop.ask(a, rows(a, {1: [2, 2, 2]}) if sparse else a.push({1: dense}))
        shop.ask(b, b.push({1: torch.ones(4, 3)}))
        shop.ask(a, rows(a, {0: [1, 1, 1]}, 2))
        shop.ask(b, rows(b, {0: [1, 1, 1], 2: [3, 3, 3]}, 2))
    assert torch.equal(shops[0].value(clock=2), shops[1].value(clock=2))


def test_a_list_may_be_pushed_whole_by_one_worker_and_in_parts_by_another():
    shop = optimized(Desk(2, values={1: torch.zeros(6), 2: torch.zeros(4)}), lr=1.0)
    a, b = shop.workers
    of_both = {0: [1, 1, 1, 1], 1: [2, 2, 2, 2], 2: [3, 3, 3, 3]}  # elements 0 to 9 of an array; row 1 is cut
    shop.ask(a, some_rows(a.push({1: floats(), 2: floats()}), [[2, 0, 4]], [of_both]))
    shop.ask(b, some_rows(b.push({2: floats()}), [[1, 6, 4]], [{1: [5, 5, 5, 5]}]))
    shop.ask(b, b.push({1: torch.ones(6)}))
    assert shop.value(1, 1).tolist() == [-2, -2, -2, -2, -3, -3]
    assert shop.value(2, 1).tolist() == [-7, -7, -3, -3]


def test_each_push_is_an_update_where_there_are_no_rounds():
    shop, a, b = updating(2).and_workers()
    shop.ask(a, a.init({5: ROWS.clone()}))
    assert torch.equal(read(shop, shop.reply(a, rows(a, {1: [1, 1, 1]}, number=5, want=True)), 5)[1], ROWS[1] - 1)
    shop.ask(b, rows(b, {1: [1, 1, 1]}, number=5))
    assert torch.equal(shop.value(5)[1], ROWS[1] - 2)


def test_rows_are_corrected_for_what_others_have_changed():
    for sparse in (True, False):
        shop, a, b = updating(2, compensation=0.5).and_workers()
        shop.ask(a, a.init({5: ROWS.clone()}))
        read(shop, shop.reply(b, b.pull([5])), 5)
        shop.ask(a, rows(a, {1: [1, 2, 3]}, number=5))
        dense = torch.zeros(4, 3)
        dense[1] = 2
        shop.ask(b, rows(b, {1: [2, 2, 2]}, number=5) if sparse else b.push({5: dense}))
        assert shop.value(5)[1].tolist() == [2, 4, 6], sparse  # 3 - 1 - (2 - 2 * 1), and so on


def test_a_sum_that_is_not_finite_updates_nothing():
    shop, a, b = optimized(desk(2, finite=True), lr=1.0).and_workers()
    shop.ask(a, rows(a, {1: [3e38, 0, 0]}))
    replies = shop.ask(b, rows(b, {1: [3e38, 0, 0]}, want=True))
    assert "not in float32" in text_of(replies[1, b.seq], "NotFinite")
    assert torch.equal(shop.value(clock=1), ROWS)


def test_a_round_goes_on_without_a_lost_worker_as_with_its_share():
    shop, a, _ = optimized(desk(2), lr=1.0).and_workers()
    shop.ask(a, rows(a, {1: [1, 1, 1]}))
    shop.shard.depart([], {1: 1})
    assert torch.equal(shop.value(clock=1)[1], ROWS[1] - 2)


def test_a_standby_gets_the_rows_alone():
    pair = optimized(desk(1, kind=Pair), "adam", lr=0.5)
    pair.records.clear()
    pair.applied = 0
    worker = pair.workers[0]
    pair.ask(worker, rows(worker, {2: [1, 2, 3]}))
    (record,) = [each for each in pair.records if isinstance(each, wire.ClosedRounds)]
    assert record.runs == [[1, 0, 3]]
    assert sum(map(len, record.buffers)) == 8 + 8 + 12


HOSTILE: list[tuple[dict[str, Any], str, str]] = [
    ({"rows": [{4: [1, 1, 1]}]}, "UsageError", r"pushed row 4 \(position 0\) of 'k1', of which .* has the rows 0 to 3"),
    ({"rows": [{-1: [1, 1, 1]}]}, "UsageError", "pushed row -1"),
    ({"rows": [{2: [1, 1, 1], 1: [1, 1, 1]}]}, "UsageError", "ids do not rise: 1 at position 1 follows 2"),
    ({"rows": [{1: [1, 1]}], "runs": [[1, 0, 2]]}, "UsageError", "rows of 2 elements of 'k1', whose shape is .* has 3"),
    ({"rows": [{1: [1, 1, 1]}], "runs": [[1, 3, 3]]}, "UsageError", "rows of 3 elements"),
    ({"rows": [{1: [1, 1]}]}, "WireError", "8 bytes of rows; 3 float32 are expected"),
    ({"rows": [{1: torch.ones(3, dtype=torch.float64)}]}, "WireError", "24 bytes of rows"),
    ({"buffers": [b"", b"", b""]}, "WireError", "0 bytes of numbers of rows"),
    ({"buffers": [b"\0" * 8]}, "WireError", "has 3 buffers"),
    ({"buffers": [(-1).to_bytes(8, "little", signed=True), b"", b""]}, "WireError", "-1 rows"),
    ({"buffers": [(1 << 40).to_bytes(8, "little"), b"", b""]}, "WireError", "bytes of ids"),
]


@pytest.mark.parametrize(("changed", "kind", "text"), HOSTILE)
def test_what_cannot_be_rows_is_refused_and_changes_nothing(changed: dict[str, Any], kind: str, text: str):
    shop, a, b = optimized(desk(2), lr=1.0).and_workers()
    wrong = some_rows(a.push({1: floats()}), changed.get("runs", [[1, 0, 3]]), changed.get("rows", [{}]))
    if "buffers" in changed:
        wrong = dataclasses.replace(wrong, buffers=changed["buffers"])
    assert re.search(text, text_of(shop.reply(a, wrong), kind))
    shop.ask(a, rows(a, {1: [1, 1, 1]}))
    shop.ask(b, rows(b, {}))
    assert torch.equal(shop.value(clock=1)[1], ROWS[1] - 1)


def test_an_id_that_comes_twice_is_refused():
    shop, a = desk(1).and_workers()
    message = rows(a, {1: [1, 1, 1], 2: [1, 1, 1]})
    message = dataclasses.replace(message, buffers=[message.buffers[0], message.buffers[1][:8] * 2, message.buffers[2]])
    assert "do not rise" in text_of(shop.reply(a, message), "UsageError")


def test_workers_must_push_rows_of_one_width():
    shop = optimized(Desk(2, values={1: torch.zeros(8)}), lr=1.0)
    a, b = shop.workers
    shop.ask(a, some_rows(a.push({1: floats()}), [[1, 0, 4]], [{0: [1, 1, 1, 1]}]))
    replies = shop.ask(b, some_rows(b.push({1: floats()}, want=True), [[1, 0, 2]], [{0: [1, 1]}]))
    assert "rows of 4 and of 2 elements of 'k1'" in text_of(replies[1, b.seq], "Mismatch")
    assert not shop.value(clock=1).any()


def test_runs_must_be_all_segments():
    with pytest.raises(WireError, match="rows of 2 segments, where there are 1"):
        some_rows(Worker().push({1: floats()}), [[2, 0, 3]], [{}])
