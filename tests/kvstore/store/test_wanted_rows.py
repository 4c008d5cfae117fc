"""Requests for rows of one table, and what they stand for where they have no ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvstore as kv
from kvstore.store.arguments import RowRequest
from kvstore.store.wanted_rows import described, wanted_rows

TABLE = kv.Table(shape=(9, 2))


def wanted(requests: list[RowRequest], pushed: list[Any] | None = None) -> Any:
    return wanted_rows("pushpull", "t", 3, TABLE, requests, pushed)


def test_a_call_is_described_by_key_and_worker() -> None:
    assert described("push", "t", 3) == "push of key 't' by worker 3"


def test_without_ids_it_is_what_is_pushed() -> None:
    values = [kv.RowSparse([5, 1], torch.zeros(2, 2)), kv.RowSparse([7], torch.zeros(1, 2))]
    requests = [RowRequest(None, None), RowRequest(None, out := torch.zeros(1, 2))]
    assert wanted(requests, values).ids.tolist() == [1, 5, 7]
    assert [request.out for request in requests] == [values[0], out]
    assert wanted([RowRequest("round", None)], values).changed


@pytest.mark.parametrize(
    ("requests", "pushed", "text"),
    [
        ([RowRequest(None, None)], None, "pushpull of key 't' by worker 3: row_ids is None; pass the ids of rows$"),
        ([RowRequest("round", None)], None, "row_ids is 'round'; pass the ids of rows$"),
        ([RowRequest("all", None)], [], "row_ids is 'all'; pass the ids of rows, or 'round'"),
        ([RowRequest(None, None)], [], "1 outs without row_ids need as many values, not 0"),
        ([RowRequest([9], None)], [], "id 9 at position 0"),
    ],
)
def test_requests_that_mean_nothing(requests: list[RowRequest], pushed: list[Any] | None, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        wanted(requests, pushed)
