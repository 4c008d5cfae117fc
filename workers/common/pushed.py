"""Pushes while backward runs: its hooks, what was pushed, what comes back, and whether gradients are what was pushed.

torch counts the writes to a tensor, but no writes through ``.data`` or numpy. So the bits of gradients are noted, too:
of small ones as a copy, of large ones as sums over chunks. A norm would not do: the opposite gradient has the same, and
rounding hides small changes. A checksum such as CRC-32 takes ten times as long as sums, which are as fast as memory.
Only what cancels out within a chunk of a large gradient is not found, such as two of its lanes that change places.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from kvstore import DeadlineExceeded, KVStore, KVStoreError
from kvstore.dynamo import outside_graphs
from kvstore.ticket import Operation, Ticket, claim
from workers.common.buckets import Progress
from workers.common.tensors import as_bits, in_memory_order
from workers.common.torch_internals import flatten, write_count

# Lanes of eight bytes in a chunk. It is odd, so that the opposite of a chunk has another sum: the sign bit at the top
# of each lane adds 2^63, and an even number of these vanishes. Hardly an array has rows of so many elements, so rows
# that change places come into other chunks.
CHUNK = 1021
SMALL = 32 << 10  # bytes; to copy so few takes no longer than to sum them


class Hooks:
    """Hooks that tell a watcher of each gradient, by ``arrive(position)``. They go with the watcher.

    ``params`` are leaves. ``resting`` says that the watcher should send nothing for now.
    """

    def __init__(self, watcher: Any, params: Sequence[torch.Tensor]) -> None:
        self.resting = False
        # Weak: parameters keep their hooks, and a trainer that the program has dropped must not push any more.
        me = weakref.ref(watcher)
        # After the accumulation: a hook by ``register_hook`` gets what one use of the tensor adds, which ``grad`` lacks
        # then, and another hook may still replace it.
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(_hook(me, position))  # type: ignore[no-untyped-call]
            for position, param in enumerate(params)
            if param.requires_grad
        ]
        weakref.finalize(watcher, _remove, self._handles)

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.resting = self.resting, True
        try:
            yield
        finally:
            self.resting = before

    @property
    def active(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        _remove(self._handles)


def _hook(me: weakref.ref[Any], position: int) -> Callable[[torch.Tensor], None]:
    @outside_graphs
    def hook(_: torch.Tensor) -> None:
        watcher = me()
        if watcher is not None:
            watcher.arrive(position)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class _Noted(NamedTuple):
    """The bits of the gradients at ``places``: copies back to back, or the sums of a single one."""

    places: list[int]
    bits: torch.Tensor


class PushedGradients:
    """The gradients of one bucket at the moment of their push. ``noted``: find writes that torch does not count."""

    def __init__(self, grads: Mapping[int, torch.Tensor], noted: bool = True) -> None:
        self._positions = list(grads)
        self._grads = list(grads.values())
        self._counts = list(map(write_count, self._grads))
        self._noted = _noted(self._grads) if noted else []

    def replaced(self, now: Mapping[int, torch.Tensor | None]) -> int | None:
        """Return the position of a gradient that is another tensor ``now``, or to which torch has counted a write."""
        for position, grad, count in zip(self._positions, self._grads, self._counts, strict=True):
            if now.get(position) is not grad or write_count(grad) != count:
                return position
        return None

    def written(self) -> int | None:
        """Return the position of a gradient whose elements are not what was pushed, whatever wrote to it."""
        for before, now in zip(self._noted, _noted(self._grads) if self._noted else [], strict=True):
            if torch.equal(before.bits, now.bits):
                continue
            sizes = [self._grads[place].numel() for place in before.places]
            for place, start, size in zip(before.places, itertools.accumulate(sizes, initial=0), sizes, strict=False):
                part = slice(start, start + size)
                if len(sizes) == 1 or not torch.equal(before.bits[part], now.bits[part]):
                    return self._positions[place]
        return None


@torch.no_grad()
def _noted(grads: Sequence[torch.Tensor]) -> list[_Noted]:
    """Return the bits of all strided ones among ``grads``: rows of a sparse gradient are pushed in the step."""
    noted: list[_Noted] = []
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, grad in enumerate(grads):
        if grad.layout != torch.strided:
            continue
        if grad.nbytes <= SMALL:
            small.setdefault((grad.dtype, grad.device), []).append(place)
        else:
            noted.append(_Noted([place], _sums(grad)))
    for places in small.values():
        flat = flatten([grads[place] for place in places])
        noted.append(_Noted(places, as_bits(flat)))
    return noted


def _sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of each chunk of the elements, in the order of memory where that is dense; and what is left."""
    raw = in_memory_order(grad).contiguous().view(torch.uint8)
    first = -raw.storage_offset() % 8  # lanes are aligned
    lanes = (raw.numel() - first) // 8
    stop = first + lanes // CHUNK * CHUNK * 8
    sums = raw[first:stop].view(torch.int64).view(-1, CHUNK).sum(dim=1)
    return torch.cat((sums.view(torch.uint8), raw[:first], raw[stop:]))


@dataclass
class Flight:
    """What has been pushed in one step.

    Attributes:
        seen: the gradients of the buckets that have been pushed, or would have been in a step that is only watched.
        pushed: a ticket for each push, with the values that it brings, by position; no values where the store writes
            them into the caller's tensors itself.
        operations: of these tickets.
        streams: the CUDA streams on which gradients were computed.
    """

    seen: list[PushedGradients] = field(default_factory=list)
    pushed: list[tuple[Ticket, dict[int, torch.Tensor]]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)


class BackwardPushes:
    """Pushes gradients, bucket by bucket, from hooks that run during backward. Derived classes say what is pushed.

    The parameters do not keep this object alive; its hooks go with it.
    """

    def __init__(
        self,
        keys: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        store: KVStore,
        buckets: Sequence[range],
        skipped: Collection[int] = (),
    ) -> None:
        self._keys, self._tensors, self._store = keys, tensors, store
        self._progress = Progress(buckets, skipped)
        self._flight = Flight()
        self._lock = threading.Lock()  # backward has a thread for each device, which runs the hooks of its parameters
        self._hooks = Hooks(self, tensors)

    def arrive(self, position: int) -> None:
        """Handle the gradient of the parameter at ``position``, which backward has just accumulated."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[None]:
        return self._hooks.paused()

    def close(self) -> None:
        self._hooks.remove()

    def _land(self) -> Flight:
        """Begin a new step; return what was pushed in the last one, which stays pushed."""
        flight, self._flight = self._flight, Flight()
        self._progress.restart()
        return flight

    def _wait_for_streams(self) -> None:
        # A store copies on the current stream of the thread that pushes, and a bucket's gradients may come from others.
        for stream in self._flight.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _pushpull(
        self,
        positions: Sequence[int],
        grads: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        *,
        priority: int,
        rescale: float | None = None,
        copy: bool = False,
    ) -> None:
        """Push gradients. What comes back goes into ``outs``, or is held in memory of its own until the step."""
        flight = self._flight
        for operation, (ticket, _) in zip(flight.operations, flight.pushed, strict=True):
            if operation.error is not None:  # it is raised at the end of the step, not by the next call
                with suppress(KVStoreError):
                    ticket.wait()
        if rescale is not None:
            self._store.set_hyperparameters(rescale_grad=rescale)
        held: dict[int, torch.Tensor] = {}
        if outs is None:
            # Not the gradients or weights themselves: while backward runs, it and the program may still read them.
            held = {
                position: torch.empty(grad.shape, dtype=grad.dtype, device="cpu")
                for position, grad in zip(positions, grads, strict=True)
            }
            outs = list(held.values())
        keys = [self._keys[position] for position in positions]
        ticket = self._store.pushpull(keys, grads, outs, priority, wait=False, copy=copy)
        flight.pushed.append((ticket, held))
        flight.operations.append(claim(ticket))


def settle(tickets: Sequence[Ticket]) -> None:
    """Wait for all tickets; raise the first error, and keep later calls from raising the others."""
    first: KVStoreError | None = None
    for ticket in tickets:
        try:
            ticket.wait()
        except DeadlineExceeded as exc:  # the others would take as long again
            raise first or exc from None
        except KVStoreError as exc:
            first = first or exc
    if first is not None:
        raise first
