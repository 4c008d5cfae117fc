"""Replicas: one model on all workers, trained by an optimizer on each, and averaged now and then.

Before an average, workers tell each other where they are (``common/gather.py``). So a worker that has finished can take
part until all have finished, and a mismatch is an error before any weight has changed.

Periodic averaging, or local SGD: Stich, "Local SGD converges fast and communicates little" (arXiv:1805.09767); with
data of their own on the workers, McMahan et al., "Communication-efficient learning of deep networks from decentralized
data" (arXiv:1602.05629).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from kvstore import DeadlineExceeded, KVStore, Mismatch, UnknownName, UsageError
from workers.averaging.stepper import Stepper, require_alike
from workers.broadcast import broadcast_parameters, load_optimizer_state, optimizer_state, share_optimizer
from workers.common.checks import at_least
from workers.common.chunks import ChunkRange, divide, read, write
from workers.common.gather import Gather, digest
from workers.common.hand_over import HandOver, take_values, values_state
from workers.common.stores import join_refusal, open_store
from workers.common.tensors import as_real, fingerprint, headroom
from workers.common.values import (
    buffers_of,
    describe,
    everything_of,
    module_or_dict,
    other_buffers_of,
    parameters_of,
)
from workers.reducer import Reducer

STEPPING, FINISHING = 1, 2


class Mark(NamedTuple):
    """Where a worker is; whether it has made steps since the last whole average; a digest of its states' names."""

    phase: int
    steps: int
    stale: int
    states: int


class Replicas(Stepper):
    """What ``PartialSync`` and ``PeriodicAveraging`` share: rank 0's values to begin with, steps, averages, an end."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str,
        buffers: bool,
        chunk_bytes: int | None,
        settings: Mapping[str, int | str],
    ) -> None:
        super().__init__(optimizer)
        model = module_or_dict(model)
        self._params = parameters_of(model, optimizer)
        self._buffers = buffers_of(model) if buffers else {}
        self._others = other_buffers_of(model) if buffers else {}
        self._trained = self._in_optimizer()
        self._store = open_store(kvstore, type(self).__name__)
        self._handed = HandOver(self._store, type(self).__name__)
        self._chunks = divide(self._values(), chunk_bytes)
        self._all = [part for chunk in self._chunks for part in chunk]
        alike = self._values() | {name: buffer.tensor for name, buffer in self._others.items()}
        require_alike(Gather(self._store, "/alike", shared=False), type(self).__name__, settings, alike)
        self._marks = Gather(self._store, "/marks", len(Mark._fields) + len(alike))  # whose number is the same for all
        self._known: set[str] = set()  # the keys of states
        self._stale = False
        self._equal: set[str] = set()  # what all workers have had equal, to the bit, when they met
        # Where workers were when all had finished, until that is dealt with.
        self._finished: dict[int, Mark] | None = None
        self._store.reserve_join(join_refusal(type(self).__name__, "Call its own join() or finish()"))
        self._model = model
        self._broadcast(everything_of(model))
        self.marks_steps = True  # whether the program's step ends after ``step``; see ``KVStore.end_step``
        self._handed.attach(
            next(iter(self._params)), self._state, self._take_over, self._params.values(), self._every_buffer
        )

    def come_back(self) -> bool:
        """Let this worker into a job that has gone on without it, if it was started again; return whether it was.

        The first forward pass in training does it, too. The worker takes over the weights, buffers and states of
        another worker that is at the beginning of a step, and goes on at that step.

        Raises:
            UsageError: the others train other parameters.
            KVStoreError: as for ``KVStore.boundary``.
        """
        return self._handed.come_back()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step of the optimizer, and do what ``after_step`` does. Returns what the optimizer's ``step`` does.

        Args:
            closure: what the optimizer's ``step`` takes: it evaluates the model again and returns the loss.
        """
        self._handed.begin_step()
        return super().step(closure)

    def after_step(self) -> None:
        """Count a step that the program has made itself, for example with a ``GradScaler``, and average what is due.

        All workers call this equally often, also for steps that the program has skipped.

        Raises:
            UsageError: the optimizer has new parameters.
            Mismatch: another worker is at another step.
            KVStoreError: an error of the store. Values are written only when the whole average has arrived.
        """
        if self._marks.waiting or self._finished is not None:
            raise UsageError("this worker has finished, and others have not: call join() or finish() again")
        self._handed.begin_step()
        self._steps += 1
        self._stale = True
        due = self._due(self._steps)
        if due:
            self._meet(STEPPING, due)
            self._average(due)
        if self.marks_steps:
            self._store.end_step()

    def finish(self, timeout: float | None = None) -> None:
        """Average everything that has changed: before an evaluation or a checkpoint, and at the end of training.

        Every worker calls this. A worker that has made fewer steps takes part in the others' averages, with the same
        weight, until they call it too. Training may go on afterwards.

        Args:
            timeout: how long to wait at once for the others' next average, in seconds; None for the store's deadline.

        Raises:
            DeadlineExceeded: others have more steps to make. Call again to wait on.
        """
        self._finish(timeout)

    def join(self, timeout: float | None = None) -> int:
        """``finish``, and give all workers the optimizer's states and hyper-parameters of the one with most steps.

        So workers are equal afterwards, whatever numbers of batches they have had.

        Args:
            timeout: as for ``finish``.

        Returns:
            The rank that has made most steps, of several the highest.

        Raises:
            DeadlineExceeded: as for ``finish``.
        """
        steps = {rank: mark.steps for rank, mark in self._finish(timeout).items()}
        last = max(steps, key=lambda rank: (steps[rank], rank))
        if self._store.num_workers > 1:
            share_optimizer(self._optimizer, last, self._store)
        return last

    def begin_join(self) -> None:
        """Say that this worker has no more batches, take part in averages that others wait for, and return at once."""
        with suppress(DeadlineExceeded):
            self._serve(0)

    def _finish(self, timeout: float | None) -> dict[int, Mark]:
        marks = self._serve(timeout)
        if any(mark.stale for mark in marks.values()):
            self._average(self._all)
        self._steps, self._finished = max(mark.steps for mark in marks.values()), None
        return marks

    def _serve(self, timeout: float | None) -> dict[int, Mark]:
        """Take part in the others' averages until all have finished; return where they are then."""
        while self._finished is None:
            marks = self._meet(FINISHING, self._all, timeout)
            going = [mark for mark in marks.values() if mark.phase == STEPPING]
            if going:
                self._average(self._due(going[0].steps))
            else:
                self._finished = marks
        return self._finished

    @property
    def steps(self) -> int:
        """The number of steps made; after ``finish``, by the worker with most."""
        return self._steps

    @property
    def rounds(self) -> int:
        """The number of averages this worker has taken part in."""
        return self._rounds

    # ---- what differs

    @abstractmethod
    def _due(self, step: int) -> Sequence[ChunkRange]:
        """What is averaged after step number ``step``, counted from 1."""

    def _states(self) -> dict[str, torch.Tensor]:
        """The optimizer's states that are averaged together with all weights."""
        return {}

    # ---- helpers

    def _state(self) -> dict[str, Any]:
        """Return what a worker that comes back takes over, between two steps."""
        values, optimizer = values_state(everything_of(self._model)), optimizer_state(self._optimizer)
        counts = {"steps": self._steps, "rounds": self._rounds, "stale": self._stale}
        return {**counts, "values": values, "optimizer": optimizer}

    def _every_buffer(self) -> list[torch.Tensor]:
        return list(self._model.buffers()) if isinstance(self._model, nn.Module) else []

    def _take_over(self, state: Mapping[str, Any]) -> None:
        take_values(everything_of(self._model), state["values"])
        load_optimizer_state(self._optimizer, state["optimizer"])
        self._steps, self._rounds, self._stale = state["steps"], state["rounds"], state["stale"]

    def _meet(self, phase: int, due: Sequence[ChunkRange], timeout: float | None = None) -> dict[int, Mark]:
        """Wait for all workers; return their marks by rank. Finds out which of the values that are ``due`` are equal.

        Buffers may be constants, and parameters may be frozen: a mean could change what all workers have equal.
        """
        if self._in_optimizer() != self._trained:
            raise UsageError(
                f"the optimizer's parameters have changed: make a new {type(self).__name__}, with its own store"
            )
        states = describe(self._states())
        mine = Mark(phase, self._steps, self._stale, digest(states) if states else 0)
        maybe = {name: param for name, param in self._params.items() if not param.requires_grad}
        maybe |= {name: buffer.tensor for name, buffer in (self._buffers | self._others).items()}
        names = {part.name for part in due} | (self._others.keys() if self._all[-1] in due else set())
        columns = [*self._params, *self._buffers, *self._others]
        # Only of what may be constant and is due: a digest reads the whole tensor, which a trained parameter never has
        # equal.
        prints = [fingerprint(maybe[name]) if name in maybe and name in names else 0 for name in columns]
        rows = self._marks.exchange([*mine, *prints], timeout)
        marks = {rank: Mark(*row[: len(mine)]) for rank, row in rows.items()}
        theirs = list(zip(*(row[len(mine) :] for row in rows.values()), strict=True))
        self._require_alike(
            marks, {name: column for name, column in zip(columns, theirs, strict=True) if name in names}
        )
        self._equal = {name for name, column in zip(columns, theirs, strict=True) if column[0] and len({*column}) == 1}
        for rank, mark in marks.items():
            if mark.states != mine.states:
                raise Mismatch(
                    f"worker {rank}'s optimizer has other states than this one's, so they cannot be averaged: a "
                    "parameter "
                    "has had no gradient yet on one of them; use momentum='keep'"
                )
            if mark.phase == phase == STEPPING and mark.steps != mine.steps:
                raise Mismatch(f"worker {rank} is at step {mark.steps}, this one at step {mine.steps}")
        return marks

    def _require_alike(self, marks: Mapping[int, Mark], prints: Mapping[str, Sequence[int]]) -> None:
        """Raise ``Mismatch`` if a parameter is frozen on some workers alone; ``prints`` are 0 where it is trained."""
        for name, column in prints.items():
            # One that has finished has made its last step when others may not have frozen it yet.
            there = {
                rank: its for (rank, mark), its in zip(marks.items(), column, strict=True) if mark.phase == STEPPING
            }
            if name in self._params and any(there.values()) and not all(there.values()):
                frozen = next(rank for rank, its in there.items() if its)
                trained = next(rank for rank, its in there.items() if not its)
                raise Mismatch(
                    f"{name!r} is frozen on worker {frozen} and trained on worker {trained}: change requires_grad on "
                    "all workers, between the same two averages"
                )

    def _broadcast(self, everything: Mapping[str, torch.Tensor]) -> None:
        values = self._values()
        keys, mine = [part.key for part in self._all], [read(values[part.name], part) for part in self._all]
        self._store.init(keys, mine)
        if self._handed.waits:  # it comes back with what another has by then
            return
        theirs = [torch.empty_like(elements) for elements in mine]
        self._store.pull(keys, theirs, copy=False)
        for part, elements in zip(self._all, theirs, strict=True):
            write(values[part.name], part, elements)
        rest = {name: value for name, value in everything.items() if name not in values}
        Reducer.over(self._store).broadcast(rest)

    def _average(self, parts: Sequence[ChunkRange]) -> None:
        """Replace the values of ``parts`` by their means over workers; the states too if ``parts`` is everything.

        What all workers have had equal when they met is not sent. Buffers that have no mean become rank 0's, in the
        last chunk's turn.
        """
        everything = len(parts) == len(self._all)
        others_due = self._all[-1] in parts
        parts = [part for part in parts if part.name not in self._equal]
        values, states = self._values(), self._states() if everything else {}
        if states:
            (state_parts,) = divide(states, None)
            new = [part for part in state_parts if part.key not in self._known]
            if new:
                self._store.init([part.key for part in new], [read(states[part.name], part) for part in new])
                self._known.update(part.key for part in new)
            values, parts = values | states, [*parts, *state_parts]
        number = self._store.num_workers
        down = headroom(number)  # for buffers, which may hold the largest numbers there are
        mine = [read(values[part.name], part) for part in parts]
        mine = [each * down if part.name in self._buffers else each for part, each in zip(parts, mine, strict=True)]
        sums = [torch.empty_like(elements) for elements in mine]
        if parts:
            self._store.pushpull([part.key for part in parts], mine, sums, copy=False)
        for part, total in zip(parts, sums, strict=True):
            mean = total / number
            write(values[part.name], part, mean / down if part.name in self._buffers else mean)
        others = {name: other.tensor for name, other in self._others.items() if name not in self._equal}
        if others_due and others and number > 1:
            broadcast_parameters(others, kvstore=self._store)
        self._rounds += 1
        self._stale = self._stale and not everything

    def _values(self) -> dict[str, torch.Tensor]:
        return self._params | {name: as_real(buffer.tensor) for name, buffer in self._buffers.items()}

    def _in_optimizer(self) -> list[int]:
        return [id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]]


CHUNK_BYTES = 8 << 20  # SINGA's threshold: 2 Mi elements of float32


class PartialSync(Replicas):
    """Averages one chunk of the weights over workers after each step. Chunks take turns.

        sync = PartialSync(model, optimizer, "dist_sync", chunk_bytes=1 << 20)
        loss.backward()
        sync.step()

    A step first updates all parameters with this worker's own gradients. Then the weights of chunk number (step - 1)
    modulo ``num_chunks`` become their mean over workers. SINGA's code does the same, while its guide says that
    gradients are averaged. With averaged weights, replicas are never more than ``num_chunks`` - 1 local steps apart.
    With averaged gradients, their differences would add up without bound.

    As in SINGA, the last layers are in the first chunk. Unlike there, a value may be cut, so that no step sends more
    than ``chunk_bytes``; buffers are averaged too; and parameters without a gradient have their turn, so that all
    workers average the same values.

    With one chunk and SGD, with or without momentum, the weights are those of synchronous training, up to rounding. The
    optimizer's states are never averaged.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Every worker gets rank 0's parameters,
            frozen ones too, and buffers. Frozen parameters count if the optimizer has them. A parameter with several
            names counts once.
        optimizer: an instance of ``torch.optim.Optimizer`` with parameters of ``model``. Gradients are those of this
            worker's batch. A loss that is a mean over it needs the learning rate of synchronous training.
        kvstore: a synchronous store without optimizer, for this alone, or the type of one to make. ``auto``:
            ``dist_sync`` in a job, ``device`` outside of one.
        chunk_bytes: how much a step sends and receives at most, in bytes; at least 8. For each worker, 32 bytes are
            added, and 8 for each parameter and buffer, by which workers see what is equal. float16 is sent as float32.
        buffers: also average buffers, such as batch-norm statistics, in their turn; see ``Reducer.average_buffers``.
            Those that have no mean become rank 0's in the turn of the last chunk.

    Raises:
        UsageError: an argument is invalid; or the store updates, or serves another model.
        Mismatch: workers disagree on the chunk size or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        buffers: bool = True,
    ) -> None:
        chunk_bytes = at_least("chunk_bytes", chunk_bytes, 8)
        super().__init__(model, optimizer, kvstore, buffers, chunk_bytes, {"chunk_bytes": chunk_bytes})

    @property
    def num_chunks(self) -> int:
        """The number of steps in which every value is averaged once."""
        return len(self._chunks)

    def _due(self, step: int) -> Sequence[ChunkRange]:
        return self._chunks[(step - 1) % len(self._chunks)]


MOMENTUM = ("keep", "average", "reset")


class PeriodicAveraging(Replicas):
    """Every worker trains alone for ``sync_every`` steps. Then all weights become their mean over workers.

        averaging = PeriodicAveraging(model, optimizer, "dist_sync", sync_every=8)
        for batch in batches:
            ...
            loss.backward()
            averaging.step()
        averaging.finish()

    It sends a ``sync_every``-th of what synchronous training sends. With ``sync_every=1`` and SGD, with or without
    momentum, the weights are those of synchronous training, up to rounding.

    The store's deadline must cover a whole period: a worker may wait for ``sync_every`` steps of the slowest.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Every worker gets rank 0's parameters,
            frozen ones too, and buffers. Frozen parameters count if the optimizer has them. A parameter with several
            names counts once.
        optimizer: an instance of ``torch.optim.Optimizer`` with parameters of ``model``; see ``PartialSync``.
        kvstore: a synchronous store without optimizer, for this alone, or the type of one to make. ``auto``:
            ``dist_sync`` in a job, ``device`` outside of one.
        sync_every: the number of steps in a period.
        warmup_steps: the number of first steps that each end with an average, because weights change fastest then.
            Periods begin after them. This is post-local SGD (Lin et al., arXiv:1808.07217).
        buffers: also average buffers, such as batch-norm statistics; see ``Reducer.average_buffers``.
        momentum: what an average does to the optimizer's states. ``keep``: each worker keeps its own, at no cost.
            ``average``: float tensors except step counts are averaged too, as in Yu et al. (arXiv:1905.03817); this
            sends the weights' size once more for SGD with momentum, twice for Adam, and needs gradients for the same
            parameters on all workers. ``reset``: the states are dropped at the end of a period, but not during warm-up,
            so that each period begins with a new optimizer; this is FedAvg. Adagrad cannot: it makes its states once.

    Raises:
        UsageError: an argument is invalid; or the store updates, or serves another model.
        Mismatch: workers disagree on a setting or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "auto",
        sync_every: int = 8,
        warmup_steps: int = 0,
        buffers: bool = True,
        momentum: str = "keep",
    ) -> None:
        self._sync_every = at_least("sync_every", sync_every, 1)
        self._warmup_steps = at_least("warmup_steps", warmup_steps, 0)
        if momentum not in MOMENTUM:
            raise UnknownName(f"unknown momentum={momentum!r}; choose from {', '.join(MOMENTUM)}")
        if momentum == "reset" and isinstance(optimizer, torch.optim.Adagrad):
            raise UsageError(
                "momentum='reset' does not work with Adagrad, which makes its states only once; choose 'keep' or "
                "'average'"
            )
        self._momentum = momentum
        settings: dict[str, int | str] = {
            "sync_every": sync_every,
            "warmup_steps": warmup_steps,
            "momentum": momentum,
        }
        super().__init__(model, optimizer, kvstore, buffers, None, settings)

    def _due(self, step: int) -> Sequence[ChunkRange]:
        local = step - self._warmup_steps
        return self._all if local <= 0 or local % self._sync_every == 0 else ()

    def _states(self) -> dict[str, torch.Tensor]:
        if self._momentum != "average":
            return {}
        return {
            f"{name}/{state}": value
            for name, tensor in self._params.items()
            for state, value in sorted(self._optimizer.state.get(tensor, {}).items())
            if state != "step" and isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        }

    def _average(self, parts: Sequence[ChunkRange]) -> None:
        super()._average(parts)
        if self._momentum == "reset" and self._steps > self._warmup_steps:
            self._optimizer.state.clear()
