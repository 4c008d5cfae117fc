"""An optimizer's hyper-parameters as plain numbers: what replicas that update by themselves must have alike. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from kvstore.plain import scalar

# How an update is computed, or what it is of; a worker with another device may have another one.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_DIGITS = 24  # so that sums of squares over thousands of workers are exact in 64 bits


class Hyperparameter(NamedTuple):
    """One number, text or tuple of these.

    Attributes:
        name: as in the parameter group.
        group: the number of the group; -1 for what is said of the optimizer as a whole.
        value: tensors and numbers of numpy as numbers of Python.
    """

    name: str
    group: int
    value: Any


class CurrentHyperparameters:
    """The hyper-parameters of one optimizer, read as often as every step: what has not changed costs next to nothing.

    What is no number, text or tuple of these is left out.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._raw: list[Any] = []
        self._keys: list[tuple[str, ...]] = []  # of each group
        self._places: list[tuple[int, str, int]] = []  # among raw values, of those that are compared: name and group
        self._mutable: list[int] = []  # places of what may change in place
        self._plain: dict[int, Any] = {}  # by place; replaced when it changes
        self._order: list[int] = []  # of the places in the last fingerprint
        self._names = b""  # of these

    def read(self) -> Mapping[int, Any]:
        """Return the values, for ``digest_of`` and ``items``; the same object as before if they are the same."""
        groups = self._optimizer.param_groups
        raw = [value for group in groups for value in group.values()]
        before = self._raw
        if _equal(raw, before) and all(_plain(raw[place]) == self._plain.get(place) for place in self._mutable):
            return self._plain
        self._raw = raw
        if self._keys != (keys := [tuple(group) for group in groups]) or len(raw) != len(before):
            self._keys = keys
            names = [(name, number) for number, group in enumerate(groups) for name in group]
            compared = ((n, *which) for n, which in enumerate(names) if which[0] not in _NOT_COMPARED)
            self._places = sorted(compared, key=itemgetter(2, 1))  # the order of keys in a group does not matter
            plain = {n: value for n, *_ in self._places if (value := _plain(raw[n])) is not ...}
        else:  # most often a rate
            plain = dict(self._plain)
            for n, *_ in self._places:
                if raw[n] is not before[n] or n in self._mutable:
                    value = _plain(raw[n])
                    plain.pop(n, None) if value is ... else plain.update({n: value})
        self._mutable = [n for n, *_ in self._places if isinstance(raw[n], torch.Tensor | np.ndarray | list)]
        if plain != self._plain:
            self._plain = plain
        return self._plain

    def items(self, values: Mapping[int, Any]) -> tuple[Hyperparameter, ...]:
        """Return ``values`` with their names."""
        return tuple(Hyperparameter(name, group, values[n]) for n, name, group in self._places if n in values)

    def fingerprint(self, values: Mapping[int, Any], more: Sequence[str] = ()) -> tuple[int, int]:
        """Return two numbers of 24 bits that stand for ``values`` by name, and ``more``."""
        order = [n for n, *_ in self._places if n in values]
        if order != self._order:
            self._order = order
            self._names = msgpack.packb([[name, group] for n, name, group in self._places if n in values])
        packed = msgpack.packb([self._names, [values[n] for n in order], list(more)])
        both = int.from_bytes(hashlib.blake2b(packed, digest_size=6).digest(), "big")
        return both >> _DIGITS, both % (1 << _DIGITS)


def difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> tuple[str, Any, Any] | None:
    """Return what differs first, in words, with both values; None if nothing does. A value that lacks is None."""
    ours = {(group, name): value for name, group, value in mine}
    others = {(group, name): value for name, group, value in theirs}
    several = len({group for group, _ in [*ours, *others] if group >= 0}) > 1
    for group, name in sorted([*ours, *(which for which in others if which not in ours)]):
        values = ours.get((group, name)), others.get((group, name))
        if repr(values[0]) != repr(values[1]):
            words = "learning rate" if name == "lr" else name
            return (f"{words} of group {group}" if several and group >= 0 else words, *values)
    return None


def _equal(one: list[Any], two: list[Any]) -> bool:
    try:
        return one == two
    except (RuntimeError, ValueError):  # tensors, or arrays, in place of others
        return False


def _plain(value: Any) -> Any:
    """Return ``value`` as compared: a float for any number, also in a tensor; ``...`` for what is not compared."""
    value = scalar(value)
    if isinstance(value, bool | int | float):
        return float(value)  # 1 and 1.0 are the same rate
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        parts = tuple(map(_plain, value))
        return ... if ... in parts else parts
    return ...
