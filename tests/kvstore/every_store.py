"""The types of stores that the tests in ``store/conformance`` run on, and what workers do in all of ``store``."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from every_worker import every_worker_of
from store_kinds import Kind

import kvstore as kv

# What a store does hardly depends on the links below and on how many share it: CI runs one test of values, of updates
# and of tables over each kind of links, alone, and with "device", which is "local"; all others run before a release.
ASSIGNING = [Kind("local"), Kind("dist_sync", 3, 2), Kind("dist_device_sync", 2, 3)]
MORE_ASSIGNING = [
    Kind("device"),
    Kind("dist_sync", 1, 1),
    Kind("dist_sync", 2, 2, "zeromq"),
    Kind("dist_sync", 2, 2, "curve"),
]
ALL, MORE = [*ASSIGNING, Kind("dist_async", 2, 2)], [*MORE_ASSIGNING, Kind("dist_async", 2, 2, "zeromq")]


def each_of(kinds: list[Kind], before_a_release: Sequence[Kind] = (), long: Sequence[Kind] = ()) -> Any:
    """Run a test against ``kinds``, against ``long`` as a long one, and against the others before a release.

    A test has a ``store``, or ``run`` as in ``store/conftest.py`` if workers do several things.
    """
    slow = [pytest.param(kind, marks=pytest.mark.long) for kind in long]
    more = [pytest.param(kind, marks=pytest.mark.release) for kind in before_a_release]
    marked = pytest.mark.parametrize("run", [*kinds, *slow, *more], ids=str, indirect=True)
    return lambda test: marked(every_worker_of("run")(test) if "store" in signature(test).parameters else test)


assigning = each_of(ASSIGNING, MORE_ASSIGNING)
every = each_of(ALL, MORE)
everywhere = each_of([*ALL, *MORE])


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
