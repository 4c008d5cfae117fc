"""What the workers of a simulated job do: they hold every value that they read to what it must be.

All pushed values are small integers, which float32 adds exactly. ``pushed`` says which worker pushes what, so that a
value that is lost, doubled or torn shows in the sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from faults.plan import pushed, total

import kvstore as kv
from kvstore.client import DistStore

# Elements: over the bound, so that all servers have some of it, and so much that it is sent without a copy; under it.
SIZES = {"cut": 10_000, "whole": 5, "one": 1}
BOUND = 1000
KEYS = list(SIZES)
ROUNDS = 6


class Wrong(AssertionError):
    """A value is not what it must be: the one thing that must never happen."""


class Interrupted(Exception):
    """What the handler of a signal raises in the middle of a call."""


class Late(NamedTuple):
    """A call that has returned and goes on."""

    tickets: list[kv.Ticket]
    outs: list[torch.Tensor]
    number: int


class Training:
    """Pushes and pulls in all the ways there are, in an order that differs from worker to worker.

    Args:
        seed: decides the order.
        mode: ``sync``, ``async`` or ``ssp``.
        compression: for ``set_gradient_compression``.
        uneven: whether rank 0 pushes less often, and all end with ``join``.
        later: whether a call that goes on while its keys are pushed again may bring the values of a later round: so it
            is where a standby takes over, which has the latest values only.

    Attributes:
        armed: the ranks whose calls may be interrupted now.
    """

    def __init__(
        self,
        seed: int,
        mode: str = "sync",
        compression: dict[str, Any] | None = None,
        uneven: bool = False,
        later: bool = False,
    ) -> None:
        self.armed: set[int] = set()
        self._seed = seed
        self._mode = mode
        self._compression = compression
        self._uneven = uneven
        self._later = later

    def __call__(self, store: DistStore) -> list[list[float]]:
        dice = random.Random(f"{self._seed} {store.rank}")
        outs = [torch.zeros(size) for size in SIZES.values()]
        if self._compression is not None:
            store.set_gradient_compression(self._compression)
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(KEYS, outs)
        late: Late | None = None
        for number in range(1, self._rounds(store.rank) + 1):
            before, late = late, self._step(store, dice, number)
            if before is not None:
                self._await(store, before)
        if late is not None:
            self._await(store, late)
        if self._uneven:
            store.join()
        else:
            store.barrier()
        store.pull(KEYS, outs)
        self._require(outs, {-float(self._sum(store, ROUNDS))}.__eq__, "at the end")
        return [out.tolist() for out in outs]

    def _step(self, store: DistStore, dice: random.Random, number: int) -> Late | None:
        """Push once to each key; return what goes on."""
        gradients = [torch.full((size,), float(pushed(store.rank, number))) for size in SIZES.values()]
        outs = [torch.full_like(gradient, 7.0) for gradient in gradients]  # weights are never positive
        way = dice.randrange(5)
        read = True
        late = None
        if way == 0:
            read = self._call(store, store.pushpull, KEYS, gradients, outs)
        elif way == 1:
            self._call(store, store.push, KEYS, gradients)
            read = False
        elif way == 2:
            for key, gradient in zip(KEYS, gradients, strict=True):
                store.push(key, gradient, priority=dice.randrange(3))
                gradient.fill_(1e6)  # it has been copied
            for key, out in reversed(list(zip(KEYS, outs, strict=True))):
                store.pull(key, out)
        elif way == 3:
            store.push(KEYS, gradients)
            store.pull(KEYS, outs)
        else:  # it may still be on its way when the next step begins
            late = Late([store.pushpull(KEYS, gradients, outs, wait=False)], outs, number)
        for gradient in gradients:
            gradient.fill_(1e6)  # nobody reads it any more
        made = store.statistics().pushes // len(KEYS)
        if made == number - 1 and way in (0, 1):  # an exception has kept the call from being made
            return self._step(store, dice, number)
        if made != number:
            raise Wrong(f"{made} pushes after {number} calls")
        if late is None:
            if not read:
                store.pull(KEYS, outs)
            self._check(store, number, outs)
        return late

    def _call(self, store: DistStore, action: Callable[..., Any], *args: Any) -> bool:
        """Return whether the call has not been interrupted."""
        self.armed.add(store.rank)
        try:
            action(*args)
        except Interrupted:
            return False
        finally:
            self.armed.discard(store.rank)
        return True

    def _await(self, store: DistStore, late: Late) -> None:
        for ticket in late.tickets:
            ticket.wait()
        self._check(store, late.number, late.outs, ROUNDS if self._later else late.number)

    def _check(self, store: DistStore, number: int, outs: list[torch.Tensor], last: int | None = None) -> None:
        if self._mode == "sync":
            right = {-float(self._sum(store, each)) for each in range(number, (last or number) + 1)}
            self._require(outs, right.issuperset, f"after push {number}")
            return
        least = sum(pushed(store.rank, earlier) for earlier in range(1, number + 1))
        most = total(store.num_workers, ROUNDS)
        self._require(
            outs,
            lambda values: all(least <= -value <= most and value.is_integer() for value in values),
            f"after push {number}",
        )

    def _rounds(self, rank: int) -> int:
        return ROUNDS - 2 if self._uneven and rank == 0 else ROUNDS

    def _sum(self, store: DistStore, number: int) -> int:
        """Return the sum of what all workers have pushed when their push ``number``, or their last, is made."""
        return sum(
            pushed(rank, earlier)
            for rank in range(store.num_workers)
            for earlier in range(1, min(number, self._rounds(rank)) + 1)
        )

    def _require(self, outs: list[torch.Tensor], right: Callable[[set[float]], bool], when: str) -> None:
        for key, out in zip(KEYS, outs, strict=True):
            values = set(out.tolist())
            if not right(values):
                raise Wrong(f"{key!r} {when} in {self._mode}: {sorted(values)[:5]}")


def add(store: DistStore) -> list[float]:
    """Values whose sum depends on the order in which they are added."""
    value = torch.full((20,), 0.1 * 10.0 ** (7 * (store.rank % 2)) + store.rank)
    out = torch.zeros(20)
    store.init("x", out)
    for _ in range(4):
        store.pushpull("x", value, out)
    return list(out.tolist())
