"""What workers do in jobs whose servers die: each contribution can be told from all others, and every bit is compared.

``Counting`` pushes powers of four, which float32 adds exactly in any order: the digits of the sum say how often each
push of each worker counts. ``Assigned`` has no optimizer. ``Bits`` uses what has a state on servers (optimizers,
encodings with residuals), and returns bytes for a comparison with an undisturbed run.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from simulation.programs import KEYS, SIZES, Interrupted, Wrong

from kvstore.client import DistStore

PUSHES = 12  # of all workers together to one key: 4 ** 12 elements of float32 are exact


class Counting:
    """Push a power of four each time, in different ways; look at how often each counts.

    With a quorum of one of two workers a push counts twice in a round of its own, and once in a round of two.

    Args:
        seed: decides the ways.
        rule: ``sync``, ``drop``, ``keep``, ``async`` or ``ssp``: what the digits must be.
        uneven: whether rank 0 pushes less often, and all end with ``join``.
        rounds: that each worker pushes; as many as can be told apart by default.

    Attributes:
        armed: the ranks whose calls may be interrupted now.
    """

    keys = KEYS  # that are pushed
    parts = 1  # of a segment that may have digits of their own

    def __init__(self, seed: int, rule: str = "sync", uneven: bool = False, rounds: int = PUSHES) -> None:
        self.armed: set[int] = set()
        self._seed = seed
        self._rule = rule
        self._uneven = uneven
        self._rounds = rounds
        self._exact = rule not in ("drop", "keep")

    def __call__(self, store: DistStore) -> list[list[float]]:
        dice = random.Random(f"{self._seed} {store.rank}")
        store.set_optimizer("sgd", learning_rate=1.0)
        self._init(store)
        rounds = min(self._rounds, PUSHES // store.num_workers)
        own = rounds - (1 if self._uneven and store.rank == 0 else 0)
        made = 0
        while made < own:
            self._push(store, dice, 4.0 ** (made * store.num_workers + store.rank))
            made = store.statistics().pushes // len(self.keys)
            self._look(store, self._read(store, dice), made, "in the middle")
            if self._rule == "keep":  # of two late ones a round would make thirds
                store.barrier()
        if self._uneven:
            store.join()
        else:
            store.barrier()
        values = self._read(store, dice)
        self._look(store, values, made, "at the end")
        self._all(store, values, made, rounds)
        return [value.reshape(-1).tolist() for value in values.values()]

    def _push(self, store: DistStore, dice: random.Random, value: float) -> None:
        gradients = self._gradients(value)
        way = dice.randrange(3)
        self.armed.add(store.rank)
        try:
            if way == 0:
                self._pushpull(store, gradients)
            elif way == 1:
                store.push(self.keys, gradients)
            else:
                for key, gradient in zip(self.keys, gradients, strict=True):
                    store.push(key, gradient)
        except Interrupted:
            if way == 2:  # some keys were pushed
                raise
        finally:
            self.armed.discard(store.rank)
            self._spoil(gradients)  # they have been copied

    def _init(self, store: DistStore) -> None:
        store.init(KEYS, [torch.zeros(size) for size in SIZES.values()])

    def _gradients(self, value: float) -> list[Any]:
        return [torch.full((size,), value) for size in SIZES.values()]

    def _pushpull(self, store: DistStore, gradients: list[Any]) -> None:
        store.pushpull(KEYS, gradients, [torch.zeros(size) for size in SIZES.values()])

    def _spoil(self, gradients: list[Any]) -> None:
        for gradient in gradients:
            gradient.fill_(1e6)

    def _read(self, store: DistStore, dice: random.Random) -> dict[str, torch.Tensor]:
        outs = [torch.zeros(size) for size in SIZES.values()]
        store.pull(KEYS, outs)
        return dict(zip(KEYS, outs, strict=True))

    def _look(self, store: DistStore, values: dict[str, torch.Tensor], made: int, when: str) -> None:
        """Require that nothing counts twice, and that what this worker has been answered counts."""
        for key, digits in self._digits(values, when):
            if max(digits) > (1 if self._exact else 2) or (not self._exact and sum(digits) % 2):
                raise Wrong(f"{key!r} {when} in {self._rule}: counted {digits}")
            own = digits[store.rank : made * store.num_workers : store.num_workers]
            if self._exact and not all(own):
                raise Wrong(f"{key!r} {when} in {self._rule}: own pushes counted {own}")

    def _all(self, store: DistStore, values: dict[str, torch.Tensor], made: int, rounds: int) -> None:
        """Require that each push of each worker counts, or is known to have been late."""
        missing = 0
        for key, digits in self._digits(values, "at the end"):
            wanted = [1] * (rounds * store.num_workers)
            if self._uneven:
                wanted[(rounds - 1) * store.num_workers] = 0
            if self._exact and digits[: len(wanted)] != wanted:
                raise Wrong(f"{key!r} at the end in {self._rule}: counted {digits} instead of {wanted}")
            own = digits[store.rank : made * store.num_workers : store.num_workers]
            missing += own.count(0)
        late = store.statistics().late
        if missing > late * self.parts:
            raise Wrong(f"{missing} own pushes do not count, and {late} segments were late")

    def _digits(self, values: dict[str, torch.Tensor], when: str) -> list[tuple[str, list[int]]]:
        found = []
        for key, sums in values.items():
            for value in sorted(set((-sums).reshape(-1).tolist())):
                if not value.is_integer() or not 0 <= value < 4**PUSHES:
                    raise Wrong(f"{key!r} {when} in {self._rule}: {value}")
                found.append((key, [int(value) >> (2 * place) & 3 for place in range(PUSHES)]))
        return found


class Assigned:
    """Push without an optimizer: each round's sum replaces the value before, and no two sums are alike."""

    def __init__(self, rounds: int) -> None:
        self.armed: set[int] = set()
        self._rounds = rounds

    def __call__(self, store: DistStore) -> list[list[float]]:
        outs = [torch.zeros(size) for size in SIZES.values()]
        store.init(KEYS, outs)
        for number in range(1, self._rounds + 1):
            right = float(sum(2 * number + rank for rank in range(store.num_workers)))
            store.pushpull(KEYS, [torch.full_like(out, 2.0 * number + store.rank) for out in outs], outs)
            self._require(outs, right, number)
            store.pull(KEYS, [out.zero_() for out in outs])  # from a standby, if the server has died since
            self._require(outs, right, number)
        store.barrier()
        return [out.tolist() for out in outs]

    def _require(self, outs: list[torch.Tensor], right: float, number: int) -> None:
        for key, out in zip(KEYS, outs, strict=True):
            if not bool((out == right).all()):
                raise Wrong(f"{key!r} after round {number}: {sorted(set(out.tolist()))} instead of {right}")


class Bits:
    """Train with optimizers that have states, change them, add keys; return all bytes.

    Args:
        seed: decides the gradients, and which optimizers.
        compression: for ``set_gradient_compression``.
        rounds: with each optimizer.
    """

    def __init__(self, seed: int, compression: dict[str, Any] | None = None, rounds: int = 3) -> None:
        self.armed: set[int] = set()
        self._seed = seed
        self._compression = compression
        self._rounds = rounds

    def __call__(self, store: DistStore) -> list[bytes]:
        """Train; return the weights of each step: what is wrong in a state shows in the next ones."""
        dice = random.Random(self._seed)
        noise = torch.Generator().manual_seed(self._seed * 1000 + store.rank)
        first, second = dice.sample(
            [
                ("adam", {"learning_rate": 0.1}),
                ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
                ("adamw", {"learning_rate": 0.01, "weight_decay": 0.1}),
                ("rmsprop", {"learning_rate": 0.01}),
            ],
            2,
        )
        if self._compression is not None:
            store.set_gradient_compression(self._compression)
        found: list[bytes] = []
        keys, outs = list(KEYS), [torch.zeros(size) for size in SIZES.values()]
        store.set_optimizer(first[0], **first[1])
        store.init(keys, outs)
        self._train(store, keys, outs, noise, found)
        self._states(store)
        self._train(store, keys, outs, noise, found)
        store.set_optimizer(second[0], **second[1])
        new = torch.full((700,), 0.25)
        store.init("new", new)
        keys.append("new")
        outs.append(new)
        self._train(store, keys, outs, noise, found)
        store.barrier()
        store.pull(keys, outs)
        found += [out.numpy().tobytes() for out in outs]
        return found

    def _train(
        self, store: DistStore, keys: list[str], outs: list[torch.Tensor], noise: torch.Generator, found: list[bytes]
    ) -> None:
        for _ in range(self._rounds):
            gradients = [torch.randn(out.shape, generator=noise) for out in outs]
            store.pushpull(keys, gradients, outs)
            found += [out.numpy().tobytes() for out in outs]

    def _states(self, store: DistStore) -> None:
        store.barrier()
        if store.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                store.save_optimizer_states(Path(directory) / "states")
                store.load_optimizer_states(Path(directory) / "states")
        store.barrier()
