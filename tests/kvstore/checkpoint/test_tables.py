"""Tables in the files of checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.checkpoint.tables import NUMBERS, StripeNames, page_name, read_page, rest_name, shared_out
from kvstore.errors import CheckpointError
from kvstore.rows.ids import stripes_of
from kvstore.rows.row_table import RowTable
from kvstore.table import MinCount, Table

TABLE = Table(dim=2, admit=MinCount(3))


def test_names_say_what_pages_a_segment_has() -> None:
    names = [page_name(7, page, part) for page in (0, 10) for part in ("ids", "state.exp_avg")]
    found = StripeNames.of([*names, rest_name(7, "young.ids"), "7/value", "7/state/momentum_buffer"])
    assert found == StripeNames({0: ["ids", "state.exp_avg"], 10: ["ids", "state.exp_avg"]}, ["young.ids"])


def test_a_page_that_is_not_of_its_table_is_damaged() -> None:
    tensors = {"1/rows/0/ids": torch.arange(2), "1/rows/0/values": torch.zeros(2, 2), "1/rows/0/seen": torch.ones(2)}
    assert read_page(TABLE, 1, 0, ["ids", "values", "seen"], tensors.__getitem__).rows.shape == (2, 2)
    with pytest.raises(CheckpointError, match="has no ids, or no rows"):
        read_page(TABLE, 1, 0, ["values"], tensors.__getitem__)
    for name, wrong in (("values", torch.zeros(2, 3)), ("values", torch.zeros(2, 2).double()), ("seen", torch.ones(3))):
        with pytest.raises(CheckpointError, match="not of a table of"):
            read_page(TABLE, 1, 0, ["ids", "values", "seen"], (tensors | {f"1/rows/0/{name}": wrong}).__getitem__)


def test_counts_of_ids_without_rows_go_to_the_servers_that_have_the_ids_now() -> None:
    ids = np.arange(40)
    old = [RowTable(TABLE, stripe, 2) for stripe in range(2)]
    for stripe, table in enumerate(old):
        own = ids[stripes_of(TABLE, ids, 2) == stripe]
        for pushed in (own, own[::2]):
            table.update(pushed, np.zeros((len(pushed), 2), np.float32), None)
    rests = shared_out(TABLE, [table.rest() for table in old], [0, 0, 0])
    counted: dict[int, int] = {}
    for stripe, rest in enumerate(rests):
        table = RowTable(TABLE, stripe, 3)
        table.restore(rest)
        assert table.version == 2
        assert set(stripes_of(TABLE, rest["young.ids"], 3)) <= {stripe}
        counted |= dict(zip(rest["young.ids"].tolist(), rest["young.counts"].tolist(), strict=True))
    assert sorted(counted) == ids.tolist()
    assert sum(counted.values()) == 40 + 20
    assert sum(rest[NUMBERS][4] for rest in rests) == 60  # rows that were refused
