"""What calls have of tables, checked: the fast way takes what is usual and right, all else has checks of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for
from played_tables import PlayedTables

from kvstore import wire
from kvstore.client.plans import RowPlan
from kvstore.client.row_calls import UsualRows, overlap, usual_requests, usual_values
from kvstore.errors import KeyNotInitialized, Mismatch, NotFinite, UsageError
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.store.arguments import RowRequest
from kvstore.table import Table, TableSpec

ROWS, WIDTH = 100, 3


def rows_of(ids: Any, scale: float = 1.0) -> torch.Tensor:
    """Rows that tell their ids."""
    flat = torch.as_tensor(ids).reshape(-1, 1).float()
    return (flat * scale + torch.arange(WIDTH)).contiguous()


@pytest.fixture(params=[1, 2, 3], ids=lambda servers: f"{servers} servers")
def played(request: pytest.FixtureRequest) -> PlayedTables:
    tables = PlayedTables(request.param)
    tables.store.init("t", Table(shape=(ROWS, WIDTH)))
    return tables


def test_init_makes_the_tables_on_all_servers_and_says_so_last():
    played = PlayedTables(2)
    played.store.init(["a", "t", "g"], [torch.ones(2), Table(shape=(ROWS, WIDTH)), Table(dim=4)])
    made = played.asked(wire.InitTables)
    assert [(each.stripe, each.stripes, each.keys) for each in made] == [(0, 2, ["t", "g"]), (1, 2, ["t", "g"])]
    assert [Table.of(each) for each in made[0].tables] == [Table(shape=(ROWS, WIDTH)), Table(dim=4)]
    assert isinstance(played.session.asked[-1][1], wire.Ready)
    assert played.session.asked[-1][1].keys == ["a", "t", "g"]
    out = torch.zeros(2)
    played.store.pull("a", out)
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize("coo", [False, True])
def test_a_table_may_begin_with_rows(coo: bool):
    played = PlayedTables(2)
    ids = [7, 3, 7, 98]
    value: Any = RowSparse(ids, rows_of(ids), (ROWS, WIDTH))
    played.store.init("t", value.to_sparse_coo() if coo else value)
    assert sum(message.count for message in played.asked(wire.PutRows)) == 3
    found = played.store.row_sparse_pull("t", row_ids=[3, 4, 7, 98])
    assert torch.equal(found, torch.stack([rows_of(3)[0], torch.zeros(WIDTH), 2 * rows_of(7)[0], rows_of(98)[0]]))


def test_rows_without_a_shape_are_no_table():
    with pytest.raises(UsageError, match=r"no shape.*a Table that grows"):
        PlayedTables(1).store.init("t", RowSparse([1], rows_of([1])))


def test_pushed_rows_are_found_again_each_at_its_server(played: PlayedTables):
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:40]
    played.store.push("t", RowSparse(ids, rows_of(ids)))
    pushes = played.asked(wire.PushRows)
    assert len(pushes) == len(played.session.servers), "each server hears of each push"
    assert sum(sum(message.counts) for message in pushes) == 40
    assert all(message.clocks == [1] for message in pushes)
    assert torch.equal(played.store.row_sparse_pull("t", row_ids=ids), rows_of(ids))
    assert all(message.clocks == [1] for message in played.asked(wire.PullRows))


def test_rows_have_no_weights(played: PlayedTables):
    with played.store.weighted(2), pytest.raises(UsageError, match=r"outside of weighted\(\)"):
        played.store.push("t", RowSparse([1], rows_of([1])))
    assert not played.asked(wire.PushRows)
    played.store.push("t", RowSparse([1], rows_of([1])))
    with played.store.weighted(2):
        assert torch.equal(played.store.row_sparse_pull("t", row_ids=[1]), rows_of([1]))


def test_each_out_may_have_its_own_ids(played: PlayedTables):
    played.store.push("t", RowSparse(range(ROWS), rows_of(range(ROWS))))
    first, second, third = torch.zeros(2, WIDTH), torch.zeros(3, WIDTH), RowSparse.zeros((ROWS, WIDTH))
    ids = [torch.tensor([1, 5]), torch.tensor([5, 80, 2]), torch.tensor([9, 5])]
    played.store.row_sparse_pull("t", [first, second, third], row_ids=ids)
    assert torch.equal(first, rows_of([1, 5]))
    assert torch.equal(second, rows_of([5, 80, 2]))
    assert third.ids.tolist() == [5, 9]
    assert torch.equal(third.rows, rows_of([5, 9]))
    assert sum(sum(message.wanted) for message in played.asked(wire.PullRows)) == 5, "each id is asked for once"


def test_pushpull_brings_the_rows_of_the_next_batch_in_the_same_messages(played: PlayedTables):
    played.store.push("t", RowSparse([1, 2], rows_of([1, 2])))
    played.session.asked.clear()
    out = torch.zeros(3, WIDTH)
    played.store.pushpull("t", RowSparse([2, 3], rows_of([2, 3], 10.0)), out, row_ids=[3, 1, 3])
    assert torch.equal(out, torch.stack([rows_of(3, 10.0)[0], rows_of(1)[0], rows_of(3, 10.0)[0]]))
    assert [type(message) for _, message in played.session.asked] == [wire.PushRows] * len(played.session.servers)
    ticket = played.store.pushpull("t", RowSparse([2], rows_of([2])), row_ids=[[2, 1]], wait=False)
    assert torch.equal(ticket.wait(), rows_of([2, 1])[None])


def test_pushpull_of_a_round_brings_all_rows_that_have_changed(played: PlayedTables):
    out = RowSparse.zeros((ROWS, WIDTH))
    ids = [50, 3, 4, 51, 99]
    played.store.pushpull("t", RowSparse(ids, rows_of(ids)), out, row_ids="round")
    assert all(message.union for message in played.asked(wire.PushRows))
    assert out.ids.tolist() == sorted(ids)
    assert torch.equal(out.rows, rows_of(sorted(ids)))


def test_only_full_rounds_have_all_rows_that_change():
    played = PlayedTables(1, Rule(quorum=1))
    played.store.init("t", Table(shape=(ROWS, WIDTH)))
    with pytest.raises(UsageError, match=r"row_ids='round'.*without a quorum.*Embedding"):
        played.store.pushpull("t", RowSparse([1], rows_of([1])), row_ids="round")
    assert not played.asked(wire.PushRows)


def test_an_output_that_is_the_pushed_memory_changes_nothing_that_is_sent(played: PlayedTables):
    memory = rows_of(range(4))
    out = memory.flip(0).clone()
    memory.copy_(rows_of(range(4)))
    played.store.pushpull("t", RowSparse(range(4), memory), memory, row_ids=[3, 2, 1, 0])
    assert torch.equal(memory, out)
    assert torch.equal(played.store.row_sparse_pull("t", row_ids=range(4)), rows_of(range(4)))


def test_tables_and_arrays_go_in_one_call():
    played = PlayedTables(2)
    tables = [Table(shape=(ROWS, WIDTH)), Table(dim=(WIDTH,), codec="fp16"), Table(shape=(ROWS, 2), dtype="float64")]
    played.store.init(["a", "t", "g", "d"], [torch.zeros(5), *tables])
    played.session.asked.clear()
    far = [2**62, -5, 17]
    doubles = torch.arange(4, dtype=torch.float64).view(2, 2)
    outs = [torch.zeros(5), torch.zeros(2, WIDTH), torch.zeros(3, WIDTH), torch.zeros(2, 2, dtype=torch.float64)]
    ticket = played.store.pushpull(
        ["a", "t", "g", "d"],
        [
            torch.arange(5.0),
            RowSparse([1, 2], rows_of([1, 2])),
            RowSparse(far, torch.ones(3, WIDTH)),
            RowSparse([4, 3], doubles),
        ],
        outs,
        row_ids=[None, [2, 1], far, [3, 4]],
        wait=False,
    )
    ticket.wait()
    assert [message.counts for message in played.asked(wire.PushRows)] != []
    assert len(played.asked(wire.PushRows)) == 2, "all tables of a server share a message"
    assert len(played.asked(wire.Push)) == 1
    assert outs[0].tolist() == list(range(5))
    assert torch.equal(outs[1], rows_of([2, 1]))
    assert torch.equal(outs[2], torch.ones(3, WIDTH))
    assert torch.equal(outs[3], doubles.flip(0))
    assert played.store.statistics().pushes == played.store.statistics().pulls == 4


def test_pull_leaves_tables_out_or_brings_all_rows(played: PlayedTables, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.client.calls.PAGE", 10 * WIDTH * 4)
    played.store.init("a", torch.ones(2))
    played.store.push("t", RowSparse(range(ROWS), rows_of(range(ROWS))))
    dense, sparse, array = torch.zeros(ROWS, WIDTH), RowSparse.zeros((ROWS, WIDTH)), torch.zeros(2)
    with pytest.warns(UserWarning, match="pull leaves out tables"):
        played.store.pull(["t", "a"], [dense, array])
    assert array.tolist() == [1, 1]
    assert not dense.any()
    played.store.pull("t", dense)
    assert not played.asked(wire.PullRows)
    played.store.pull(["t", "a"], [[dense, sparse], array], ignore_sparse=False)
    assert torch.equal(dense, rows_of(range(ROWS)))
    assert sparse.ids.tolist() == list(range(ROWS))
    assert torch.equal(sparse.rows, dense)
    assert max(sum(message.wanted) for message in played.asked(wire.PullRows)) <= 10


def test_an_empty_push_counts_and_is_told_to_all_servers(played: PlayedTables):
    played.store.push("t", RowSparse.zeros((ROWS, WIDTH)))
    played.store.push("t", RowSparse([1], rows_of([1])))
    assert sorted(message.clocks[0] for message in played.asked(wire.PushRows)) == sorted(
        [1, 2] * len(played.session.servers)
    )
    assert played.store.statistics().pushes == 2


def test_hyper_parameters_and_priorities_travel_with_the_push(played: PlayedTables):
    played.store.set_hyperparameters(learning_rate=0.5, rescale_grad=2.0)
    played.store.push("t", RowSparse([1], rows_of([1])), priority=7)
    assert {(message.lr, message.rescale, message.priority) for message in played.asked(wire.PushRows)} == {
        (0.5, 2.0, 7)
    }


def test_an_aggregator_hears_nothing_of_tables():
    played = PlayedTables(2, aggregator=True)
    played.store.init("t", Table(shape=(ROWS, WIDTH)))
    played.store.push("t", RowSparse([1, 2], rows_of([1, 2])))
    assert torch.equal(played.store.row_sparse_pull("t", row_ids=[2]), rows_of([2]))
    assert b"aggregator 0" not in {peer for peer, _ in played.session.asked}


ONE, TWO = torch.ones(1, WIDTH), torch.ones(2, WIDTH)
NAN = torch.tensor([[0.0, 1, 2], [1, float("nan"), 1]])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda s: s.push("t", RowSparse([1, 100], TWO)),
            UsageError,
            "push of key 't' by worker 0: id 100 at position 1",
        ),
        (lambda s: s.push("t", RowSparse([-1], ONE)), UsageError, "id -1 at position 0"),
        (lambda s: s.push("t", RowSparse([1], torch.ones(1, 4))), Mismatch, r"by worker 0.*float32\[\*, 4\]"),
        (lambda s: s.push("t", RowSparse([1], ONE.double())), Mismatch, r"float64\[\*, 3\]"),
        (lambda s: s.push("t", RowSparse([1], ONE, (9, 3))), Mismatch, r"float32\[9, 3\]"),
        (lambda s: s.push("t", torch.ones(ROWS, 3)), Mismatch, "takes a RowSparse"),
        (lambda s: s.push("a", RowSparse([1], ONE)), UsageError, "RowSparse"),
        (
            lambda s: s.push("t", RowSparse([4, 6], NAN)),
            NotFinite,
            "push of key 't' by worker 0: the row of id 6 at position 1 has NaN",
        ),
        (lambda s: s.row_sparse_pull("t", row_ids=[3, ROWS]), UsageError, "id 100 at position 1"),
        (lambda s: s.row_sparse_pull("t", row_ids=[1.5]), UsageError, "integers"),
        (lambda s: s.row_sparse_pull("t", ONE.clone(), row_ids=[1, 2]), Mismatch, r"an out of \[2, 3\]"),
        (lambda s: s.row_sparse_pull("a", row_ids=[1]), Mismatch, "'a' is float32"),
        (lambda s: s.row_sparse_pull("x", row_ids=[1]), KeyNotInitialized, "'x'"),
        (
            lambda s: s.pushpull(["t", "a"], [RowSparse([1], ONE), torch.ones(2)], row_ids=[[1], [1]]),
            UsageError,
            "'a' has an array",
        ),
        (lambda s: s.pull("g", torch.zeros(1, 3), ignore_sparse=False), UsageError, "has no last row"),
        (lambda s: s.evict("a"), Mismatch, "'a' is"),
    ],
)
def test_bad_input_says_what_is_wrong_and_nothing_is_sent_or_counted(call: Any, error: type[Exception], text: str):
    played = PlayedTables(2, Rule(finite=True))
    played.store.init(["a", "t", "g"], [torch.ones(2), Table(shape=(ROWS, WIDTH)), Table(dim=WIDTH)])
    played.session.asked.clear()
    with pytest.raises(error, match=text):
        call(played.store)
    assert not played.session.asked
    assert played.store.statistics().pushes == played.store.statistics().pulls == 0


TABLES = [Table(shape=(10, 4)), Table(dim=4), Table(shape=(5, 4))]
IDS = [[0, 9], [-(2**60), 7], []]


@pytest.fixture
def plan() -> RowPlan:
    return RowPlan(entries_for({str(n): TableSpec.of(table) for n, table in enumerate(TABLES)}, 2, 10), list("012"))


with torch.inference_mode():
    _INFERENCE = torch.zeros(2, 4)


def ids_of(*given: list[int]) -> list[Any]:
    return [np.array(each, np.int64) for each in given]


def values(rows: torch.Tensor | None = None) -> list[list[Any]]:
    whole = torch.ones(4, 4) if rows is None else rows
    return [[RowSparse(ids, part)] for ids, part in zip(IDS, whole.split([2, 2, 0]), strict=True)]


def test_values_of_one_array_and_of_several(plan: RowPlan) -> None:
    whole = torch.arange(20.0).view(5, 4)
    usual = usual_values(plan, values(whole[1:]))
    assert usual is not None
    assert [each.tolist() for each in usual.ids] == IDS
    assert usual.block is not None
    assert usual.block.firsts.tolist() == [1, 3, 5]
    assert usual.block.rows.tolist() == whole.tolist()
    apart = values()
    apart[1] = [RowSparse(IDS[1], torch.ones(2, 4))]
    usual = usual_values(plan, apart)
    assert usual is not None
    assert usual.block is None


@pytest.mark.parametrize(
    "value",
    [
        RowSparse([9, 0], torch.ones(2, 4)),
        RowSparse([0, 0], torch.ones(2, 4)),
        RowSparse([0, 10], torch.ones(2, 4)),
        RowSparse([-1, 0], torch.ones(2, 4)),
        RowSparse([0, 9], torch.ones(2, 3)),
        RowSparse([0, 9], torch.ones(2, 4).double()),
        RowSparse([0, 9], torch.ones(4, 2).T),
        RowSparse([0, 9], torch.tensor([[1.0, 1, 1, 1], [1, 1, float("nan"), 1]])),
        RowSparse([0, 9], torch.ones(2, 4), (11, 4)),
        RowSparse.over(torch.tensor([0, 9]), torch.ones(2, 4, device="meta")),
        RowSparse.over(torch.tensor([0, 9]), torch.ones(2, 4, dtype=torch.cfloat).conj().imag),
        RowSparse.over(torch.tensor([0, 9]), torch.eye(2, 4).to_sparse()),
        RowSparse.over(torch.tensor([0, 5, 9])[::2], torch.ones(2, 4)),
        RowSparse.over(torch.tensor([0, 9]), torch.ones(2, 4, dtype=torch.bfloat16)),
        torch.sparse_coo_tensor([[0, 9]], torch.ones(2, 4), (10, 4), check_invariants=True),
        torch.ones(10, 4),
    ],
)
def test_values_that_are_not_usual(plan: RowPlan, value: Any) -> None:
    given = values()
    assert usual_values(plan, given) is not None
    given[0] = [value]
    assert usual_values(plan, given) is None


def test_values_that_have_changed_since(plan: RowPlan) -> None:
    given = values()
    given[0][0].ids = torch.tensor([0.5, 1])
    assert usual_values(plan, given) is None
    given = values()
    given[0][0].rows = given[0][0].rows[:1]
    assert usual_values(plan, given) is None
    assert usual_values(plan, [[*values()[0] * 2], *values()[1:]]) is None  # of two devices


def test_nan_between_the_rows_is_nobodys(plan: RowPlan) -> None:
    whole = torch.full((7, 4), float("nan"))
    whole[1:3] = whole[4:6] = 1
    given = [[RowSparse(ids, part)] for ids, part in zip(IDS, (whole[1:3], whole[4:6], whole[6:6]), strict=True)]
    assert usual_values(plan, given) is not None
    whole[5, 3] = float("nan")
    assert usual_values(plan, given) is None


def test_requests_with_and_without_outs(plan: RowPlan) -> None:
    out = torch.zeros(2, 4)
    requests = [[RowRequest(torch.tensor(IDS[0]), out)], *([RowRequest(each, None)] for each in ids_of(*IDS[1:]))]
    usual = usual_requests(plan, requests)
    assert usual is not None
    assert usual.rows[0].ctypes.data == out.data_ptr()
    assert usual.block is None
    assert [request.out.shape for (request,) in requests] == [(2, 4), (2, 4), (0, 4)]


@pytest.mark.parametrize(
    ("ids", "out"),
    [
        ([0, 9], None),
        (None, None),
        ("round", RowSparse.zeros((10, 4))),
        (np.array([0, 10]), None),
        (np.array([3, 3]), None),
        (np.array([0, 9], np.int32), None),
        (np.array([[0, 9]]), None),
        (np.array([0, 9]), RowSparse.zeros((10, 4))),
        (np.array([0, 9]), torch.zeros(3, 4)),
        (np.array([0, 9]), torch.zeros(2, 4).double()),
        (np.array([0, 9]), torch.zeros(4, 2).T),
        (np.array([0, 9]), np.zeros((2, 4), np.float32)),
        (np.array([0, 9]), torch.zeros(2, 4, requires_grad=True)),
        (np.array([0, 9]), torch.nn.Parameter(torch.zeros(2, 4))),
        (np.array([0, 9]), torch.zeros(2, 4, device="meta")),
        (np.array([0, 9]), torch.ones(2, 4, dtype=torch.cfloat).conj().imag),
        (np.array([0, 9]), _INFERENCE),
        (torch.tensor([0.0, 9.0]), None),
    ],
)
def test_requests_that_are_not_usual(plan: RowPlan, ids: Any, out: Any) -> None:
    others = [[RowRequest(each, None)] for each in ids_of(*IDS[1:])]
    assert usual_requests(plan, [[RowRequest(np.array([0, 9]), None)], *others]) is not None
    assert usual_requests(plan, [[RowRequest(ids, out)], *others]) is None


def test_the_ids_that_are_pushed(plan: RowPlan) -> None:
    pushed = usual_values(plan, values())
    assert pushed is not None
    same = usual_requests(plan, [[RowRequest(each, None)] for each in ids_of(*IDS)], pushed)
    assert same is not None
    assert same.ids is pushed.ids
    for others in ([[0, 8], IDS[1], []], [[], [-(2**60), 7], [0]]):
        usual = usual_requests(plan, [[RowRequest(each, None)] for each in ids_of(*others)], pushed)
        assert usual is not None
        assert [each.tolist() for each in usual.ids] == others
    shifted = [[RowRequest(each, None)] for each in ids_of([0], [9, -(2**60)], [7])]  # the same, one after the other
    assert usual_requests(plan, shifted, pushed) is None


def test_one_table_whose_rows_are_written_where_others_are_read() -> None:
    one = RowPlan(entries_for({"one": TableSpec.of(TABLES[0])}, 2, 10), ["one"])
    whole, ids = torch.zeros(6, 4), np.arange(2)
    pushed = usual_values(one, [[RowSparse(ids, whole[2:4])]])
    assert pushed is not None
    for start in range(5):
        wanted = usual_requests(one, [[RowRequest(ids, whole[start : start + 2])]], pushed)
        assert wanted is not None
        assert wanted.ids is pushed.ids
        assert overlap(pushed, wanted) == (0 < start < 4)


def memory(*parts: torch.Tensor) -> UsualRows:
    return UsualRows([], np.zeros(0, np.int64), [part.numpy() for part in parts], None, parts)


def test_memory_that_is_read_and_written() -> None:
    whole = torch.zeros(9, 4)
    read = memory(whole[2:4], whole[6:7], whole[:0])
    for rows, expected in (([whole[:2]], False), ([whole[4:6], whole[7:]], False), ([whole[1:3]], True)):
        assert overlap(read, memory(*rows)) == expected
    assert overlap(read, memory(whole[8:], whole[6:7]))
    assert not overlap(read, memory(whole[3:3], torch.zeros(9, 4)))
    assert not overlap(read, memory(whole[3:3]))


def test_rows_of_several_dimensions_and_those_that_require_gradients() -> None:
    table = Table(shape=(10, 2, 2))
    one = RowPlan(entries_for({"one": TableSpec.of(table)}, 2, 10), ["one"])
    usual = usual_values(one, [[RowSparse([0, 9], torch.arange(8.0).view(2, 2, 2).requires_grad_())]])
    assert usual is not None
    assert usual.rows[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    out = torch.zeros(2, 2, 2)
    usual = usual_requests(one, [[RowRequest(np.array([0, 9]), out)]])
    assert usual is not None
    usual.rows[0][1] = 7
    assert out[1].tolist() == [[7, 7], [7, 7]]
