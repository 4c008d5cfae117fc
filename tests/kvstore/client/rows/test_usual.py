"""The fast way takes what is usual and right, and leaves all else to the checks of each table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for

from kvstore import RowSparse, Table
from kvstore.client.plans import RowPlan
from kvstore.client.row_calls import UsualRows, overlap, usual_requests, usual_values
from kvstore.store.arguments import RowRequest
from kvstore.table import TableSpec

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
