"""Replicas that update by themselves: what they begin with, what they must have alike, and how they end alike.

Each worker makes the same update of its own copy of a model. So a rate that differs on one worker, or an update that
one does not make, would part the copies for ever. What must be alike is compared as sums that travel with each step's
gradients (``mark``, ``require``). Only when they differ do workers ask each other for more, to name the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore import KVStore, Mismatch
from kvstore.store.base import ReservedJoin
from workers.broadcast import Relay, broadcast_parameters, share_optimizer
from workers.common import bundle
from workers.common.gather import Gather
from workers.common.hyperparameters import CurrentHyperparameters, Hyperparameter, difference
from workers.common.stores import join_refusal

# Where a worker is when it says what it has.
BACKWARD, STEP, BETWEEN = range(3)
WIDTH = 7  # numbers in a mark
_UNFROZEN = "parameters that were unfrozen or added since the last step"


class Alike:
    """What the replicas of one optimizer tell each other. Its methods are collective but for ``mark`` and ``changed``.

    Args:
        optimizer: this worker's.
        store: a synchronous store without optimizer, for this alone. Its ``join`` is reserved.
        owner: the name of the class that makes the updates, for messages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, store: KVStore, owner: str) -> None:
        self._optimizer, self._store, self._owner = optimizer, store, owner
        self._current = CurrentHyperparameters(optimizer)
        self._gather = Gather(store, "/alike", 2)
        self._joins: list[ReservedJoin] = []
        self._ended: set[int] = set()  # those of the joins whose end ``join`` has seen
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

    # ---- each step

    def mark(self, phase: int, unfrozen: Sequence[str] = ()) -> list[int]:
        """Return numbers whose sums over workers show whether these have the same hyper-parameters; for ``require``.

        A count, and for each number that stands for something its sum and the sum of its squares: n numbers are equal
        exactly if n times the sum of their squares is the square of their sum.

        Args:
            phase: where this worker is.
            unfrozen: the names of parameters that are to be averaged from now on.
        """
        said, unfrozen = self._current.read(), tuple(unfrozen)
        if said is not self._said or unfrozen != self._unfrozen:
            self._said, self._unfrozen = said, unfrozen
            self._digits = self._current.fingerprint(said, unfrozen)
        self._phase = phase
        one, two = self._digits
        return [1, phase, phase**2, one, one**2, two, two**2]

    @property
    def changed(self) -> bool:
        """Whether the hyper-parameters differ from those of the last ``mark``."""
        return self._current.read() is not self._said

    def require(self, sums: Sequence[int]) -> None:
        """Require that all workers have the same, by the sums of their marks.

        Raises:
            Mismatch: they have not. The message names what differs, with both values.
        """
        if all(_equal(sums[0], *pair) for pair in zip(sums[1::2], sums[2::2], strict=True)):
            return
        one, two = self._digits
        rows = self._gather.exchange([1 + self._phase, one << 24 | two])
        there = [rank for rank, (phase, _) in enumerate(rows) if phase]  # others have joined
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
        """Join ``store``, too, and let nobody else do so."""
        self._joins.append(store.reserve_join(join_refusal(self._owner)))

    def begin_join(self) -> None:
        """Say that this worker has run out of batches; return at once."""
        for number, join in enumerate(self._joins):
            if number not in self._ended:
                join.begin()

    def join(self, timeout: float | None, rounds: int) -> tuple[int, bool]:
        """Say that this worker has run out of batches; return when all workers have.

        Args:
            timeout: of each store; see ``KVStore.join``.
            rounds: how many this worker has been in since the last join.

        Returns:
            The worker that has been in most rounds, of several the highest; and whether others have been in fewer.
        """
        self.begin_join()
        for number, join in enumerate(self._joins):
            if number not in self._ended:
                join.join(timeout)
                self._ended.add(number)
        counts = [theirs for _, theirs in self._gather.exchange([1, rounds])]
        self._ended.clear()
        return max(range(len(counts)), key=lambda rank: (counts[rank], rank)), min(counts) < max(counts)


def in_one_phase(sums: Sequence[int]) -> bool:
    """Return whether all workers are in one phase, by the sums of their marks."""
    return _equal(*sums[:3])


def _equal(count: int, total: int, squares: int) -> bool:
    """Return whether ``count`` numbers are equal, which have this sum, and this sum of squares."""
    return count * squares == total**2


def _number(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else "not set" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
