"""Replicas that update by themselves: what they begin with, what they must have alike, and how they end alike.

Each worker makes the same update of its own copy of a model. So a rate that differs on one worker, or an update that
one does not make, would part the copies for ever. What must be alike is compared as sums that travel with each step's
gradients (``mark``, ``require``). Only when they differ do workers ask each other for more, to name the difference.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from kvstore import KVStore, Mismatch
from kvstore.plain import scalar
from kvstore.store.base import ReservedJoin
from workers.broadcast import Relay, broadcast_parameters, share_optimizer
from workers.common import bundle
from workers.common.gather import Gather, digest
from workers.common.stores import join_refusal
from workers.common.values import buffers_around, describe

log = logging.getLogger(__name__)

# Where a worker is when it sends its mark.
BACKWARD, STEP, BETWEEN = range(3)
WIDTH = 7  # numbers in a mark
_UNFROZEN = "parameters that were frozen, unfrozen or added since the last step"


# How an update is computed, or what it is of; a worker with another device may have another one.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_DIGITS = 24  # so that sums of squares over thousands of workers are exact in 64 bits


class Hyperparameter(NamedTuple):
    """One number, text or tuple of these. Group -1 is for what is said of the optimizer as a whole."""

    name: str
    group: int
    value: Any


class CurrentHyperparameters:
    """The hyper-parameters of one optimizer: numbers, texts and tuples of these. They are read in every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._raw: list[Any] = []
        self._keys: list[tuple[str, ...]] = []  # of each group
        self._places: list[tuple[int, str, int]] = []  # of compared values: place among the raw ones, name, group
        self._mutable: list[int] = []  # places of what may change in place
        self._plain: dict[int, Any] = {}  # by place; replaced when it changes
        self._order: list[int] = []  # of the places in the last fingerprint
        self._names = b""  # of these

    def read(self) -> Mapping[int, Any]:
        """The values by place, for ``fingerprint`` and ``items``; the same object as before if they are the same."""
        groups = self._optimizer.param_groups
        raw = [value for group in groups for value in group.values()]
        before = self._raw
        if _unchanged(raw, before) and all(_plain(raw[place]) == self._plain.get(place) for place in self._mutable):
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


def _unchanged(one: list[Any], two: list[Any]) -> bool:
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


class Alike:
    """What the replicas of one optimizer tell each other. Its methods are collective but for ``mark`` and ``changed``.

    ``store`` is synchronous, without optimizer, for this alone. Its ``join`` is reserved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, store: KVStore, owner: str) -> None:
        self._optimizer, self._store, self._owner = optimizer, store, owner
        self._current = CurrentHyperparameters(optimizer)
        self._gather = Gather(store, "/alike", 2)
        self._joins: list[ReservedJoin] = []
        self._ended: set[int] = set()  # the joins whose end ``join`` has seen
        self._said: Mapping[int, Any] | None = None  # the hyper-parameters of the last mark
        self._unfrozen: tuple[str, ...] = ()
        self._digits = 0, 0
        self._phase = BACKWARD
        self.reserve(store)

    # ---- the beginning

    def give(self, values: Mapping[str, torch.Tensor], root: int = 0) -> None:
        """Give all workers the ``values`` of ``root``, and the states and hyper-parameters of its optimizer."""
        broadcast_parameters(values, root, kvstore=self._store)
        share_optimizer(self._optimizer, root, self._store)

    def give_buffers(self) -> None:
        """Give all workers rank 0's buffers of the modules that hold the optimizer's parameters.

        If the modules differ between workers, every worker keeps its own buffers and logs a warning.
        """
        groups = self._optimizer.param_groups
        buffers = buffers_around(tensor for group in groups for tensor in group["params"])
        about = digest(describe(buffers))
        rows = self._gather.exchange([1, about])
        if any(there != about for _, there in rows.values()):
            log.warning(
                "%s leaves each worker's buffers as they are: the modules that hold its parameters differ between "
                "workers; broadcast_parameters(model) sends rank 0's",
                self._owner,
            )
        elif buffers:
            broadcast_parameters(buffers, kvstore=self._store)

    # ---- each step

    def mark(self, phase: int, unfrozen: Sequence[str] = ()) -> list[int]:
        """Return numbers whose sums over workers show whether these have the same hyper-parameters; for ``require``.

        ``unfrozen``: the names of parameters that are averaged from now on, or no more.
        """
        said, unfrozen = self._current.read(), tuple(unfrozen)
        if said is not self._said or unfrozen != self._unfrozen:
            self._said, self._unfrozen = said, unfrozen
            self._digits = self._current.fingerprint(said, unfrozen)
        self._phase = phase
        one, two = self._digits
        # Sums cost no message of their own, as a gather would: they travel with the counts of the step's gradients.
        return [1, phase, phase**2, one, one**2, two, two**2]

    @property
    def changed(self) -> bool:
        return self._current.read() is not self._said

    def require(self, sums: Sequence[int]) -> None:
        """Raise ``Mismatch``, which names what differs, unless the sums of marks show that all are alike."""
        if all(_equal(sums[0], *pair) for pair in zip(sums[1::2], sums[2::2], strict=True)):
            return
        one, two = self._digits
        rows = self._gather.exchange([1 + self._phase, one << 24 | two])
        there = list(rows)  # others have joined
        first = there[0]
        other = next((rank for rank in there if rows[rank][1] != rows[first][1]), None)
        if other is None:
            raise Mismatch(self._moments({rank: rows[rank][0] - 1 for rank in there}))
        packed = bundle.pack([tuple(item) for item in self._items])[0]
        ours, theirs = (bundle.unpack(Relay(self._store, rank).send_bytes(packed), []) for rank in (first, other))
        found = difference(ours, theirs)
        what, mine, its = found if found is not None else ("hyper-parameters", "some", "others")
        raise Mismatch(
            f"workers disagree on the {what} for the same step: {_number(mine)} on worker {first}, {_number(its)} on "
            f"worker {other}; all workers must set the same, at the same point of the step"
        )

    def _moments(self, phases: Mapping[int, int]) -> str:
        late = max(phases.values())
        ahead = next(rank for rank, phase in phases.items() if phase == late)
        other = next(rank for rank, phase in phases.items() if phase != late)
        return (
            f"worker {ahead} has changed hyper-parameters between backward() and step(), and worker {other} has not: "
            "all workers must set the same, at the same point of the step"
        )

    @property
    def _items(self) -> tuple[Hyperparameter, ...]:
        extra = (Hyperparameter(_UNFROZEN, -1, self._unfrozen),) if self._unfrozen else ()
        return extra + self._current.items(self._said or {})

    # ---- the end of the data

    def reserve(self, store: KVStore) -> None:
        self._joins.append(store.reserve_join(join_refusal(self._owner)))

    def begin_join(self) -> None:
        for number, join in enumerate(self._joins):
            if number not in self._ended:
                join.begin()

    def join(self, timeout: float | None, rounds: int) -> tuple[int, bool]:
        """Return the rank with most ``rounds``, of several the highest, and whether others had fewer."""
        self.begin_join()
        for number, join in enumerate(self._joins):
            if number not in self._ended:
                join.join(timeout)
                self._ended.add(number)
        counts = {rank: theirs for rank, (_, theirs) in self._gather.exchange([1, rounds]).items()}
        self._ended.clear()
        return max(counts, key=lambda rank: (counts[rank], rank)), min(counts.values()) < max(counts.values())


def in_one_phase(sums: Sequence[int]) -> bool:
    return _equal(*sums[:3])


def _equal(count: int, total: int, squares: int) -> bool:
    """Return whether ``count`` numbers are equal, which have this sum, and this sum of squares."""
    return count * squares == total**2


def _number(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else "not set" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
