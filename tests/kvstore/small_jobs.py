"""What tests of jobs with small arrays share: where arrays are cut, a deadline that passes, a look at a value."""

from __future__ import annotations

from typing import Any

import torch

import kvstore as kv

BOUND = 300  # elements: arrays of so many are cut over the servers
SOON = 0.05  # seconds: the deadline of what cannot come


def value_of(store: kv.KVStore, key: Any, *shape: int) -> torch.Tensor:
    out = torch.empty(shape)
    store.pull(key, out)
    return out
