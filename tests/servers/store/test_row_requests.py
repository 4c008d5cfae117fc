"""Tables: requests for rows, and tables in a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Worker, floats, optimized, sender, text_of
from asking_rows import ask, pull_rows, push_rows, rows_in, with_tables

from kvstore import wire
from kvstore.errors import WireError
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowUpdater
from kvstore.rows.layout import array_of, bytes_of, integers
from kvstore.rows.sums import RowBatch
from kvstore.table import Table, Unseen
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.row_target import (
    KEPT,
    GroupContribution,
    RowContribution,
    RowTarget,
    TableGroup,
    TableGroups,
    alike,
    at_one_point,
)
from servers.store.tables.row_requests import all_in_stripe, usual_push
from servers.store.target import ParkedRequest

# ---- requests for rows: what is checked of them, and rows as answers


def int32(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def of(ids: tuple[int, ...], row_bytes: int, wanted: tuple[int, ...]) -> dict[str, Any]:
    return {"buffers": [int32(*ids), bytes(row_bytes), int32(*wanted)]}


def refused(worker: Worker, **changed: Any) -> Any:
    message = push_rows(worker, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [4, 9]})
    return type(message)(**{**vars(message), **changed})


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (of((4, 1), 16, (4, 9)), "UsageError", "worker 0 pushed rows of 't7' whose ids do not rise: 1 at"),
        (of((4, 4), 16, (4, 9)), "UsageError", "4 at position 1 follows 4"),
        (of((1, 10), 16, (4, 9)), "UsageError", "pushed row 10 (position 1) of 't7', whose rows are 0 to 9"),
        (of((-1, 1), 16, (4, 9)), "UsageError", "pushed row -1 (position 0)"),
        (of((1, 4), 16, (4, 99)), "UsageError", "worker 0 asked for row 99 (position 1)"),
        (of((1, 4), 16, (9, 4)), "UsageError", "asked for rows of 't7' whose ids do not rise"),
        (of((1, 4), 32, (4, 9)), "WireError", "sent 32 bytes of rows; 2 rows of 't7' as none are 16"),
        (of((1,), 16, (4, 9)), "WireError", "worker 0 sent 4 bytes of ids; 2 are 8"),
        ({"buffers": [int32(1, 4), bytes(16)]}, "WireError", "a push of rows has 3 buffers, not 2"),
        ({"counts": [3]}, "WireError", "worker 0 sent 8 bytes of ids; 3 are 12"),
        ({"wide": True}, "WireError", "worker 0 sent 8 bytes of ids; 2 are 16"),
        ({"clocks": [3], "ids": [9]}, "KeyNotInitialized", "segment 9 has no value on this server"),
        ({"ids": [1]}, "UsageError", "key 'k1' is an array: it has no rows that are pushed or pulled by ids"),
        ({"changes": [[0, "momentum", 0.5]]}, "UsageError", "momentum cannot become 0.5"),
    ],
)  # fmt: skip
def test_a_push_that_cannot_be_right_is_refused_and_changes_nothing(changed: dict[str, Any], kind: str, said: str):
    desk, a = with_tables(1).and_workers()
    ask(desk, a.init({1: floats(0)}))
    optimized(desk, lr=1.0)
    assert said in text_of(desk.reply(a, refused(a, **changed)), kind)
    good = refused(a)
    assert rows_in(desk.reply(a, good)) == [[[-3, -3], [0, 0]]]  # its clock is 1 still


@pytest.mark.parametrize("table", [Table(shape=(10, 2)), Table(dim=2)])
def test_a_row_of_another_servers_stripe_is_refused(table: Table):
    desk, a = with_tables(1, tables={7: table}, stripes=3).and_workers()
    replies = [desk.reply(a, pull_rows(a, {7: [each]})) for each in range(10)]
    texts = [text_of(reply, "UsageError") for reply in replies if not isinstance(reply, wire.Rows)]
    assert 0 < len(texts) < 10
    assert all("(position 0) of 't7', which is not on this server: it has stripe 0 of 3" in text for text in texts)


def test_rows_that_are_pushed_and_wanted_are_checked_once_and_well():
    desk, a = optimized(with_tables(1), lr=1.0).and_workers()
    for wrong in ((4, 1), (1, 10)):
        assert text_of(desk.reply(a, refused(a, **of(wrong, 16, wrong))), "UsageError")
    message = push_rows(a, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [1, 4]})
    assert rows_in(desk.reply(a, message)) == [[[-1, -2], [-3, -3]]]


def test_ids_of_one_table_may_begin_below_the_last_one_of_another():
    desk = with_tables(1, tables={7: Table(shape=(10, 2)), 8: Table(shape=(10, 2)), 9: Table(shape=(10, 2))})
    (a,) = desk.workers
    reply = desk.reply(a, push_rows(a, {7: {9: (1, 1)}, 8: {}, 9: {0: (2, 2)}}, wanted={7: [], 8: [3, 4], 9: [0]}))
    assert rows_in(reply) == [[], [[0, 0], [0, 0]], [[2, 2]]]
    wrong = push_rows(a, {7: {9: (1, 1)}, 8: {5: (0, 0), 4: (0, 0)}, 9: {}}, 2)
    assert "of 't8' whose ids do not rise" in text_of(desk.reply(a, wrong), "UsageError")


@pytest.mark.parametrize(("codec", "expected"), [("fp16", [[1.5, -2]]), ("bf16", [[1.5, -2]]), ("int8", [[1.5, -2]])])
def test_rows_are_encoded_both_ways(codec: str, expected: list[list[float]]):
    desk, a = with_tables(1).and_workers()
    reply = desk.reply(a, push_rows(a, {7: {1: (1.5, -2)}}, wanted={7: [1]}, codec=codec))
    np.testing.assert_allclose(rows_in(reply, codec=codec)[0], expected, rtol=0.02)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("width", [2, 4])  # rows of 16 bytes are one array for all tables
def test_nan_is_refused_before_it_counts_and_names_worker_key_row_and_position(codec: str, width: int):
    desk, a, b = with_tables(2, tables={number: Table(dim=width) for number in (7, 8)}).and_workers()
    row = [1.0] * width
    wrong = push_rows(b, {7: {1: row}, 8: {4: row, 6: [float("nan"), *row[1:]]}}, codec=codec)
    said = "worker 1 pushed NaN in row 6 (position 1) of 't8'; nothing has been updated"
    assert text_of(desk.reply(b, wrong), "NotFinite") == said
    for worker in (a, b):  # the round is open still
        desk.ask(worker, push_rows(worker, {7: {1: row}, 8: {4: row}}))
    assert rows_in(desk.reply(a, pull_rows(a, {8: [4, 6]}, 1)), width) == [[[2.0] * width, [0.0] * width]]


FIXED, GROWING = Table(shape=(99, 4)), Table(dim=4)


def the_target(table: Table = FIXED, stripe: int = 0, stripes: int = 1) -> RowTarget:
    return RowTarget(7, "t", table, stripe, stripes, Rounds([0]))


def a_push(ids: tuple[int, ...] = (1, 5, 9), wanted: tuple[int, ...] | None = None, **changed: Any) -> Any:
    worker = with_tables(1).workers[0]
    message = push_rows(worker, {7: dict.fromkeys(ids, (1.0, 2.0, 3.0, 4.0))}, wanted={7: list(wanted or ids)})
    return type(message)(**{**vars(message), **changed})


@pytest.mark.parametrize("table", [FIXED, GROWING])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_ids_and_rows_of_a_usual_push_are_views_of_the_message(table: Table, kind: Any):
    message = a_push()
    message = type(message)(**{**vars(message), "buffers": [kind(bytes(buffer)) for buffer in message.buffers]})
    usual = usual_push(message, the_target(table))
    assert usual is not None
    ids, rows, starts = usual.batch
    assert (usual.answer, starts) == (True, [0, 3])
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 5, 9]
    assert rows.tolist() == [[1, 2, 3, 4]] * 3
    assert rows.base is not None


NAN = np.full((3, 4), np.nan, np.float32).tobytes()


@pytest.mark.parametrize(
    "message",
    [
        a_push((9, 5)),
        a_push((5, 5)),
        a_push((5, 99)),
        a_push((-2, 5)),
        a_push((1, 3, 4)),
        a_push((1, 5), (1, 4)),
        a_push((1, 5), (3, 1)),
        a_push(union=True),
        a_push(codecs=["fp16"]),
        a_push(wide=True),
        a_push(counts=[2], wanted=[2]),
        a_push(buffers=[b"", b""]),
        a_push(buffers=[a_push().buffers[0], NAN, a_push().buffers[2]]),
        a_push(buffers=[a_push().buffers[0], NAN[:-16], a_push().buffers[2]]),
    ],
)
def test_what_is_unusual_or_wrong_is_left_to_the_other_checks(message: Any):
    assert usual_push(a_push((1, 5, 9)), the_target(stripe=1, stripes=2)) is not None
    assert usual_push(message, the_target(stripe=1, stripes=2)) is None


@pytest.mark.parametrize("stripes", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_ids_of_a_stripe_are_told_from_others(stripes: int, dtype: Any):
    for stripe in range(stripes):
        target = the_target(stripe=stripe, stripes=stripes)
        own = np.arange(stripe, 99, stripes, dtype=dtype)
        assert all_in_stripe(target, own)
        others = [each for each in range(99) if each % stripes != stripe]
        assert not any(all_in_stripe(target, np.append(own, dtype(each))) for each in others)


def the_group(table: Table = FIXED) -> TableGroup:
    return TableGroup([RowTarget(number, f"t{number}", table, 1, 2, Rounds([0])) for number in (7, 8, 9)])


def to_group(*ids: tuple[int, ...], wanted: Any = None, **changed: Any) -> Any:
    worker = with_tables(1).workers[0]
    rows = {number: dict.fromkeys(own, (1.0, 2.0, 3.0, number)) for number, own in zip((7, 8, 9), ids, strict=True)}
    own = {number: list(of) for number, of in rows.items()} if wanted is None else wanted
    message = push_rows(worker, rows, wanted=own)
    return type(message)(**{**vars(message), **changed})


IDS = np.array([1, 3, 5], np.int32).tobytes()


@pytest.mark.parametrize("wide", [False, True])
def test_a_usual_push_to_a_group_is_one_batch(wide: bool):
    worker = with_tables(1).workers[0]
    rows = {7: {1: (1, 1, 1, 1), 5: (2, 2, 2, 2)}, 8: {}, 9: {1: (3, 3, 3, 3)}}
    message = push_rows(worker, rows, wanted={number: list(own) for number, own in rows.items()}, wide=wide)
    pushed = usual_push(message, the_group())
    assert pushed is not None
    assert pushed.answer
    assert pushed.batch.ids.dtype == np.int64
    assert (pushed.batch.ids.tolist(), pushed.batch.starts) == ([1, 5, 1], [0, 2, 2, 3])
    assert pushed.batch.rows[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("changed", [{"want": False}, {"wanted": [1], "buffers": [*a_push().buffers[:2], int32(4)]}])
def test_a_usual_push_may_want_other_rows_or_none(changed: Any):
    usual = usual_push(a_push(**changed), the_target())
    assert usual is not None
    assert not usual.answer


@pytest.mark.parametrize("wanted", [{7: [3], 8: [1, 97]}, {}])
def test_a_usual_push_to_a_group_may_want_other_rows_or_none(wanted: Any):
    pushed = usual_push(to_group((1,), (1, 3), (5,), wanted=wanted), the_group())
    assert pushed is not None
    assert not pushed.answer


@pytest.mark.parametrize(
    "message",
    [
        to_group((9, 5), (1,), (1,)),
        to_group((1,), (5, 3), (1,)),
        to_group((1,), (3,), (99,)),
        to_group((1,), (-1, 3), (5,)),
        to_group((1,), (3,), (4,)),
        to_group((), (), ()),
        to_group((1,), (3,), (5,), wanted={7: [2]}),
        to_group((1,), (3,), (5,), wanted={8: [99]}),
        to_group((1,), (3,), (5,), wanted={9: [5, 3]}),
        to_group((1,), (3,), (5,), union=True),
        to_group((1,), (3,), (5,), codecs=["none", "fp16", "none"]),
        to_group((1,), (3,), (5,), wide=True),
        to_group((1,), (3,), (5,), counts=[1, 1, 2]),
        to_group((1,), (3,), (5,), buffers=[b"", b""]),
        to_group((1,), (3,), (5,), buffers=[IDS, NAN, IDS]),
        to_group((1,), (3,), (5,), buffers=[IDS, NAN[:-16], IDS]),
    ],
)
def test_what_is_unusual_or_wrong_of_a_group_is_left_to_the_other_checks(message: Any):
    assert usual_push(message, the_group()) is None


def test_an_array_comes_back_and_cannot_be_written_to() -> None:
    rows = np.arange(6, dtype=np.float64).reshape(3, 2)
    back = array_of(bytes_of(rows), 3, 2, "float64", "rows")
    assert np.array_equal(back, rows)
    assert not back.flags.writeable
    assert integers(bytes_of(np.array([5, -1]))).tolist() == [5, -1]


def test_no_rows_are_no_bytes() -> None:
    assert array_of(bytes_of(np.empty((0, 3), np.float32)), 0, 3, "float32", "rows").shape == (0, 3)
    assert integers(b"").shape == (0,)


def test_another_length_is_refused() -> None:
    with pytest.raises(WireError, match="2 rows are 24 bytes, not 20"):
        array_of(bytes(20), 2, 3, "float32", "rows")
    with pytest.raises(WireError, match="1 numbers are 8 bytes, not 9"):
        integers(bytes(9))


# ---- tables in a group: what they share, and what each has when the group is split


SMALL = Table(shape=(9, 4))
SGD = describe("sgd", {})


def a_target(number: int, table: Table = SMALL, stripe: int = 0, version: int = 3) -> RowTarget:
    target = RowTarget(number, f"t{number}", table, stripe, 2, Rounds([0, 1], version))
    target.use(RowUpdater(SGD, target.key, "float32", table.width, table.grows))
    return target


def contributed(group: TableGroup, rank: int, clock: int, ids: list[int], starts: list[int]) -> None:
    rows = np.arange(len(ids) * 4, dtype=np.float32).reshape(-1, 4)
    item = GroupContribution([rank], clock, RowBatch(np.array(ids), rows, starts), UpdateHyperparameters(0.5), None)
    assert group.rounds.contribute([rank], clock, item)


def pushed(ids: list[int]) -> wire.PushRows:
    zeros = [0] * len(ids)
    return wire.PushRows(
        sender(), 0, ids, zeros, zeros, zeros, False, False, False, None, None, [], ["none"] * len(ids)
    )


def test_each_table_has_its_part_of_open_rounds_when_the_group_is_split() -> None:
    groups, targets = TableGroups(), [a_target(7), a_target(8)]
    group = groups.make(targets)
    assert groups.find([7, 8]) is group
    assert groups.find([8, 7]) is None
    contributed(group, 1, 4, [2, 4, 6], [0, 1, 3])
    group.judged, group.last_at = 3, 12.5
    assert groups.split(targets[1]) is targets[1]
    assert groups.find([7, 8]) is None
    found: Any = [(target.rounds.version, target.rounds.open(), target.group, target.last_at) for target in targets]
    assert [(version, own, at) for version, _, own, at in found] == [(3, None, 12.5)] * 2
    items = [item for _, ((clock, ranks, item),), *_ in found if (clock, ranks) == (4, [1])]
    assert [item.ids.tolist() for item in items] == [[2], [4, 6]]
    assert [item.rows[:, 0].tolist() for item in items] == [[0], [4, 8]]
    assert [item.batch[1] for item in items] == [0, 1]
    assert items[0].batch[0] is items[1].batch[0]
    assert items[0].who == "worker 1"


def test_requests_wait_for_just_those_tables_that_they_name() -> None:
    targets = [a_target(7), a_target(8), a_target(9)]
    group = TableGroup(targets)
    push = ParkedRequest(b"", pushed([7, 8, 9]), left=1)
    pull = ParkedRequest(b"", wire.PullRows(sender(), 0, [8, 3], [4, 1], [0, 0], False, ["none"] * 2), left=2)
    group.parked += [(4, push), (4, pull)]
    group.split()
    assert [[parked for _, parked in target.parked] for target in targets] == [[push], [push, pull], [push]]
    assert (push.left, pull.left) == (3, 2)
    assert not group.parked


def test_what_the_last_rounds_have_changed_is_known_of_each_table() -> None:
    targets = [a_target(7), a_target(8)]
    targets[0].note_changed(np.array([2]))
    group = TableGroup(targets)
    for version in range(4, 9):
        group.rounds.version = version
        group.note_changed([(np.array([0, version, 2]), [0, 2, 3]), (np.array([6]), [0, 0, 1])])
    group.split()
    assert {version: ids.tolist() for version, ids in targets[0].changed.items()} == {v: [0, v] for v in range(5, 9)}
    assert targets[1].changed_in(8).tolist() == [2, 6]


@pytest.mark.parametrize(
    "other",
    [
        a_target(8, Table(shape=(9, 8))),
        a_target(8, Table(shape=(9, 4), dtype="float64")),
        a_target(8, Table(shape=(9, 4), codec="fp16")),
        a_target(8, Table(dim=4)),
        a_target(8, Table(dim=4, evict=Unseen(3))),
        a_target(8, stripe=1),
    ],
)
def test_tables_of_another_kind_are_not_alike(other: RowTarget) -> None:
    assert alike([a_target(7), a_target(8, Table(shape=(5, 4)))])
    assert not alike([a_target(7), other])


def test_tables_at_different_points_are_no_group() -> None:
    assert at_one_point([a_target(7), a_target(8)])
    assert not at_one_point([a_target(7), a_target(8, version=4)])
    open_round, waited_for, stepped, failed, assigned = (a_target(8) for _ in range(5))
    open_round.rounds.contribute([0], 4, None)  # type: ignore[arg-type]
    waited_for.parked.append((4, ParkedRequest(b"", pushed([8]))))
    stepped.table.steps = 1
    failed.fail(3, MemoryError())
    assigned.use(None)
    for other in (open_round, waited_for, stepped, failed, assigned):
        assert not at_one_point([a_target(7), other])
    assert not at_one_point([assigned, assigned])


def test_union_answers_with_all_rows_that_the_round_has_changed_and_their_ids():
    desk, a, b = optimized(with_tables(), lr=1.0).and_workers()
    mine, theirs = push_rows(a, {7: {1: (1, 0), 5: (1, 0)}}, union=True), push_rows(b, {7: {2: (1, 0)}}, union=True)
    desk.ask(a, mine)
    replies = desk.ask(b, theirs)
    for reply in replies.values():
        assert rows_in(reply) == [[[-1, 0]] * 3]
        assert np.frombuffer(reply.buffers[1], np.int32).tolist() == [1, 2, 5]


def test_which_rows_have_changed_is_known_of_the_last_rounds_only():
    rounds: Rounds[RowContribution] = Rounds([0])
    target = RowTarget(7, "t", Table(shape=(9, 2)), 0, 1, rounds)
    message = np.arange(9)
    for clock in range(1, KEPT + 3):
        rounds.contribute([0], clock, RowContribution([0], clock, message, np.zeros((9, 2)), UpdateHyperparameters()))
        rounds.complete()
        target.note_changed(message[clock : clock + 1])
    assert {version: ids.tolist() for version, ids in target.changed.items()} == {
        version: [version] for version in range(3, KEPT + 3)
    }
    assert all(ids.base is None for ids in target.changed.values())  # the message may go


def test_a_segment_of_a_table_is_one_target():
    target = RowTarget(7, "t", Table(dim=3), 1, 2, Rounds([0]))
    assert (target.ids, target.segments.keys, target.width, target.dtype) == ((7,), ["t"], 3, "float32")
    assert str(target.segments.specs[0]) == "a table of float32[*, 3]"
    assert (target.table.stripe, target.table.stripes) == (1, 2)
