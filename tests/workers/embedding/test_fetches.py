from __future__ import annotations

import torch

from kvstore import Table
from kvstore.ticket import Ticket
from workers.embedding.fetches import Fetch
from workers.embedding.lookups import look_up

TABLE = Table(dim=2)


def test_rows_with_one_of_zeros_below_them() -> None:
    lookup = look_up("t", TABLE, [5, 3, 5])
    fetch = Fetch(TABLE, lookup)
    fetch.ticket = Ticket("pull", ["t"])
    fetch.out.copy_(torch.tensor([[3.0, 3], [5, 5]]))
    assert fetch.take(lookup).tolist() == [[3, 3], [5, 5], [0, 0]]
    part = look_up("t", TABLE, torch.tensor([5]))
    assert fetch.covers(part)
    assert fetch.take(part).tolist() == [[5, 5], [0, 0]]
    assert not fetch.covers(look_up("t", TABLE, [5, 4]))
