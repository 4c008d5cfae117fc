"""Replicas: one model on all workers, each trained by an optimizer of its own, whose values are averaged now and then.

Before an average, workers show each other where they are (``common/gather.py``). So a worker that has finished can go
on taking part until all have, and what does not fit together is an error before any weight has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import kvstore as kv
from kvstore import KVStore, Mismatch, UsageError
from workers.common.chunks import ChunkRange, divide, read, write
from workers.common.gather import Gather, digest
from workers.common.values import buffers_of, describe, parameters_of

STEPPING, FINISHING = 1, 2


class Mark(NamedTuple):
    """Where a worker is.

    Attributes:
        phase: ``STEPPING``, in a step, or ``FINISHING``, in ``finish``.
        steps: how many it has made.
        stale: whether it has made any since everything was averaged.
        states: what stands for the optimizer's states that are averaged too; 0 for none.
    """

    phase: int
    steps: int
    stale: int
    states: int


class Replicas(ABC):
    """What ``PartialSync`` and ``PeriodicAveraging`` share: steps, averages, an end.

    On construction every worker gets rank 0's values.

    Args:
        model: see ``values.parameters_of``.
        optimizer: of this worker; it has all of its parameters.
        kvstore: a synchronous store without optimizer, for this alone, or the name of one.
        buffers: average the floating-point buffers of ``model`` too.
        chunk_bytes: see ``chunks.divide``; None for all values in one chunk.
        settings: what else must be the same on all workers, by name.

    Raises:
        UsageError: see ``values.parameters_of`` and ``Gather``.
        Mismatch: another worker has another model or other settings.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str,
        buffers: bool,
        chunk_bytes: int | None,
        settings: Mapping[str, int | str],
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is an instance of one in torch.optim here, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._params = parameters_of(model, optimizer)
        self._buffers = buffers_of(model) if buffers else {}
        self._trained = self._in_optimizer()
        self._store = kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        self._chunks = divide(self._values(), chunk_bytes)
        self._all = [part for chunk in self._chunks for part in chunk]
        self._marks = Gather(self._store, "/marks", shared=False)
        self._agree(settings)
        self._known: set[str] = set()  # the keys of states
        self._steps = self._rounds = 0
        self._stale = False
        self._broadcast()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step of the optimizer, and average what is due; returns what the optimizer's ``step`` does."""
        loss: float | None = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self.after_step()
        return loss

    def after_step(self) -> None:
        """Count a step that the program has made itself, as with a ``GradScaler``, and average what is due.

        Also for a step that the program has left out: all workers call it equally often.

        Raises:
            UsageError: the optimizer has got new parameters.
            Mismatch: another worker is at another step.
            KVStoreError: what the store raises. Values are written when all of an average have come, not before.
        """
        self._steps += 1
        self._stale = True
        due = self._due(self._steps)
        if due:
            self._meet(STEPPING)
            self._average(due)

    def finish(self) -> None:
        """Average everything that has changed: before an evaluation, a checkpoint, and at the end of training.

        Every worker calls it. One that has made fewer steps than others takes part in their averages until they come
        here too, as the others' equal. Training may go on afterwards.
        """
        marks = self._meet(FINISHING)
        while going := [mark for mark in marks if mark.phase == STEPPING]:
            self._average(self._due(going[0].steps))
            marks = self._meet(FINISHING)
        if any(mark.stale for mark in marks):
            self._average(self._all)
        self._steps = max(mark.steps for mark in marks)

    @property
    def steps(self) -> int:
        """How many steps have been made; after ``finish``, by the worker that has made most."""
        return self._steps

    @property
    def rounds(self) -> int:
        """How many averages this worker has taken part in."""
        return self._rounds

    # ---- what differs

    @abstractmethod
    def _due(self, step: int) -> Sequence[ChunkRange]:
        """What is averaged after step number ``step``, counted from 1."""

    def _states(self) -> dict[str, torch.Tensor]:
        """The optimizer's states that are averaged whenever everything is."""
        return {}

    # ---- helpers

    def _agree(self, settings: Mapping[str, int | str]) -> None:
        """Require that all workers have made the same."""
        kind, model = type(self).__name__, digest(describe(self._values()))
        numbers = [digest(value) if isinstance(value, str) else value for value in settings.values()]
        rows = self._marks.exchange([digest(kind), model, *numbers])
        for rank, (its_kind, its_model, *its) in enumerate(rows):
            if its_kind != digest(kind):
                raise Mismatch(f"worker {rank} has made something else than a {kind}")
            for (name, value), number, other in zip(settings.items(), numbers, its, strict=False):
                if other != number:
                    theirs = "another" if isinstance(value, str) else f"{other}"
                    raise Mismatch(f"workers disagree on {name}: {value} on this one, {theirs} on worker {rank}")
            if its_model != model:
                raise Mismatch(
                    f"worker {rank} has another model, optimizer or setting of buffers: the names, shapes, dtypes and "
                    "order of what is averaged must be the same on all"
                )

    def _meet(self, phase: int) -> list[Mark]:
        """Wait for all workers; return where they are, by rank."""
        if self._in_optimizer() != self._trained:
            raise UsageError("the optimizer has got other parameters; make this anew, with a store of its own")
        states = describe(self._states())
        mine = Mark(phase, self._steps, self._stale, digest(states) if states else 0)
        marks = [Mark(*row[: len(mine)]) for row in self._marks.exchange(mine)]
        for rank, mark in enumerate(marks):
            if mark.states != mine.states:
                raise Mismatch(
                    f"worker {rank}'s optimizer has other states than this one's, so they cannot be averaged: some "
                    "parameter has got no gradient yet, there or here; use momentum='keep'"
                )
            if mark.phase == phase == STEPPING and mark.steps != mine.steps:
                raise Mismatch(f"worker {rank} is at step {mark.steps}, this one at step {mine.steps}")
        return marks

    def _broadcast(self) -> None:
        """Give all workers rank 0's values."""
        values = self._values()
        keys, mine = [part.key for part in self._all], [read(values[part.name], part) for part in self._all]
        self._store.init(keys, mine)
        theirs = [torch.empty_like(elements) for elements in mine]
        self._store.pull(keys, theirs, copy=False)
        for part, elements in zip(self._all, theirs, strict=True):
            write(values[part.name], part, elements)

    def _average(self, parts: Sequence[ChunkRange]) -> None:
        """Replace the values of ``parts``, and the states if these are all, by their mean over workers."""
        everything = len(parts) == len(self._all)
        values, states = self._values(), self._states() if everything else {}
        if states:
            (its,) = divide(states, None)
            new = [part for part in its if part.key not in self._known]
            if new:
                self._store.init([part.key for part in new], [read(states[part.name], part) for part in new])
                self._known.update(part.key for part in new)
            values, parts = values | states, [*parts, *its]
        mine = [read(values[part.name], part) for part in parts]
        sums = [torch.empty_like(elements) for elements in mine]
        self._store.pushpull([part.key for part in parts], mine, sums, copy=False)
        for part, total in zip(parts, sums, strict=True):
            write(values[part.name], part, total / self._store.num_workers)
        self._rounds += 1
        self._stale = self._stale and not everything

    def _values(self) -> dict[str, torch.Tensor]:
        return self._params | {name: buffer.tensor for name, buffer in self._buffers.items()}

    def _in_optimizer(self) -> list[int]:
        return [id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]]
