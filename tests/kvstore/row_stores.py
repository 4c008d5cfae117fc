"""What the suite of tables shares: the stores that it is run against, and a table of ten rows."""

from __future__ import annotations

from typing import Any

import torch
from every_store import each_of
from store_kinds import Kind

import kvstore as kv

ROWS, WIDTH = 10, 3
ONES = kv.Table(shape=(ROWS, WIDTH), init="constant")  # all rows are ones

LOCAL, SYNC, ASYNC = Kind("local"), Kind("dist_sync", 3, 2), Kind("dist_async", 3, 2)
ROUNDS = [LOCAL, SYNC]
HOSTS = Kind("dist_sync", 4, 2, aggregators=2)
QUORUM, SSP = Kind("dist_sync", 3, 2, quorum=3), Kind("dist_ssp", 2, 3)
MORE_ROUNDS = [
    Kind("device"),
    Kind("dist_sync", 1, 1),
    Kind("dist_device_sync", 2, 3),
    Kind("dist_sync", 2, 2, "curve"),
]
MORE_UPDATES = [Kind("dist_async", 2, 2, "shm"), Kind("dist_async", 4, 2, aggregators=2)]


every = each_of([*ROUNDS, ASYNC], [*MORE_ROUNDS, *MORE_UPDATES], long=[HOSTS, QUORUM, SSP])  # with an optimizer
everywhere = each_of([*ROUNDS, ASYNC], long=[HOSTS, QUORUM, SSP, *MORE_ROUNDS, *MORE_UPDATES])
updating = each_of(ROUNDS, MORE_ROUNDS, long=[HOSTS, QUORUM])  # with one, in rounds
in_rounds = each_of(ROUNDS, MORE_ROUNDS, long=[HOSTS])  # in rounds that every worker is in


def begin(store: kv.KVStore, table: Any = ONES, lr: float = 1.0, key: Any = "t", **options: Any) -> None:
    store.set_optimizer("sgd", learning_rate=lr, **options)
    store.init(key, table)


def grads(ids: Any, value: float = 1.0, width: int = WIDTH) -> kv.RowSparse:
    count = torch.as_tensor(ids).numel()
    return kv.RowSparse(ids, torch.full((count, width), float(value)))


def firsts(store: kv.KVStore, ids: Any = None, key: Any = "t") -> list[float]:
    """The first element of each of the rows ``ids``, of all rows of the table by default."""
    rows = store.row_sparse_pull(key, row_ids=list(range(ROWS)) if ids is None else ids)
    assert bool((rows == rows[..., :1]).all()) or not rows.numel()
    return rows[..., 0].reshape(-1).tolist()
