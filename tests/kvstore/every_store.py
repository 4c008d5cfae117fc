"""The types of stores that the tests in ``store/conformance`` run on, and what workers do in all of ``store``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from store_kinds import Kind

import kvstore as kv

ASSIGNING = [
    Kind("local"),
    Kind("device"),
    Kind("dist_sync", 1, 1),
    Kind("dist_sync", 3, 2),
    Kind("dist_device_sync", 2, 3),
    Kind("dist_sync", 2, 2, "zeromq"),
    Kind("dist_sync", 2, 2, "curve"),
]
ALL = [*ASSIGNING, Kind("dist_async", 1, 1), Kind("dist_async", 2, 2), Kind("dist_async", 2, 2, "zeromq")]
assigning = pytest.mark.parametrize("run", ASSIGNING, ids=str, indirect=True)
every = pytest.mark.parametrize("run", ALL, ids=str, indirect=True)


def one_to(n: int) -> int:
    return n * (n + 1) // 2


def mine(store: kv.KVStore) -> int:
    """What this worker contributes."""
    return store.rank + 1


def all_of(store: kv.KVStore) -> int:
    return one_to(store.num_workers)


def pulled(store: kv.KVStore, key: Any, like: Any) -> np.ndarray[Any, Any]:
    out = torch.empty_like(like) if isinstance(like, torch.Tensor) else torch.empty(like)
    store.pull(key, out)
    return out.float().numpy()


def settle(store: kv.KVStore, *tickets: kv.Ticket) -> None:
    """Return when the pushes of all workers have taken effect."""
    for ticket in tickets:
        ticket.wait()
    store.barrier()
