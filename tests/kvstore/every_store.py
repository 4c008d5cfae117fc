"""The types of stores that the tests in ``store/conformance`` run on, and what workers do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv

BOUND = 300  # elements: arrays of so many are cut over the servers


@dataclass(frozen=True)
class Kind:
    """A type of store, and how many workers and servers use it together; none for a local one.

    Attributes:
        links: what their links are, as ``ThreadedJob`` knows them.
    """

    name: str
    workers: int = 0
    servers: int = 0
    links: str = "inproc"

    @property
    def dist(self) -> bool:
        return self.workers > 0

    def __str__(self) -> str:
        links = "" if self.links == "inproc" else f"-{self.links}"
        return f"{self.name}-{self.workers}x{self.servers}{links}" if self.dist else self.name


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
Run = Callable[[Callable[[kv.KVStore], Any]], list[Any]]
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


def settled(store: kv.KVStore, ticket: kv.Ticket) -> None:
    """Return when the pushes of all workers have taken effect."""
    ticket.wait()
    store.barrier()
