"""The arguments of ``init``, checked: new keys, and the arrays that are their first values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore.dist.plans.entries import Entries
from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.spec import Key, Spec
from kvstore.store.arguments import group, one_kind, pairs
from kvstore.values import Arrays, Layout, as_tensors, kinds_of, spec_of, values_of


def new_arrays(key: Any, value: Any, known: Entries, kind: type | None) -> tuple[list[Key], list[Any], type]:
    """Return new keys, all different, the first value of each, and the type of the store's keys.

    Args:
        key, value: see ``KVStore.init``.
        known: the store's keys.
        kind: their type; None while there are none.

    Raises:
        AlreadyInitialized: the store has one of the keys.
        UsageError: a key is listed twice, or is not of the type of the others.
    """
    listed = pairs(key, value, kind)
    if listed is None:
        grouped = group(key, value)
        kind = one_kind(grouped, kind)
        if isinstance(key, list | tuple) and len(grouped) < len(key):
            raise UsageError("init was given a key twice; list each key once")
        listed = list(grouped), list(grouped.values()), kind
    for each in listed[0]:
        if each in known.places:
            raise AlreadyInitialized(f"key {each!r} is already initialized; push a new value instead")
    return listed


def distinct(arrays: Sequence[Any]) -> tuple[list[int], list[Spec], Arrays | list[torch.Tensor]]:
    """Return the index of each array's spec, the specs, and contiguous arrays. Of several devices the first counts."""
    known = kinds_of(arrays)
    if known is not None:
        values = values_of(arrays, Layout(*known))
        if values is not None:
            return known[0].tolist(), known[1], values
    firsts = [as_tensors(array)[0] for array in arrays]
    kinds: dict[Spec, int] = {}
    numbers = [kinds.setdefault(spec_of(first), len(kinds)) for first in firsts]
    return numbers, list(kinds), [first.contiguous() for first in firsts]
