from __future__ import annotations

import torch
from looked_up import look_up

from kvstore import Table
from kvstore.ticket import Ticket
from workers.embedding.lookups import fetches_of

TABLE = Table(dim=2)


def test_rows_with_one_of_zeros_below_them() -> None:
    lookup = look_up("t", TABLE, [5, 3, 5])
    fetch = fetches_of({"t": TABLE, "other": Table(dim=3)}, {"t": lookup})["t"]
    fetch.ticket = Ticket("pull", ["t"])
    fetch.out.copy_(torch.tensor([[3.0, 3], [5, 5]]))
    assert fetch.take(lookup).tolist() == [[3, 3], [5, 5], [0, 0]]
    part = look_up("t", TABLE, torch.tensor([5]))
    assert fetch.covers(part)
    assert fetch.take(part).tolist() == [[5, 5], [0, 0]]
    assert not fetch.covers(look_up("t", TABLE, [5, 4]))


def test_rows_of_tables_that_are_alike_lie_in_one_tensor() -> None:
    tables = {"a": TABLE, "b": Table(dim=3), "c": TABLE, "d": Table(dim=2, dtype="float64")}
    lookups = {key: look_up(key, tables[key], ids) for key, ids in (("d", [1]), ("a", [4, 2]), ("b", []), ("c", [7]))}
    fetches = fetches_of(tables, lookups)
    assert list(fetches) == list(lookups)
    for key, fetch in fetches.items():
        assert fetch.out.shape == (len(lookups[key].ids), tables[key].width)
        assert str(fetch.out.dtype) == f"torch.{tables[key].dtype}"
        fetch.out.fill_(1)
    assert [fetch.take(fetch.lookup)[-1].sum().item() for fetch in fetches.values()] == [0, 0, 0, 0]
    memory = {key: fetch.out.untyped_storage().data_ptr() for key, fetch in fetches.items()}
    assert memory["a"] == memory["c"] != memory["d"]
