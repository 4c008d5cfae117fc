"""Gradients that have been pushed, and whether they are still what was pushed.

torch counts the writes to a tensor, but not those through ``.data`` or numpy. So the bits of gradients are noted, too:
of small ones as a copy, of large ones as sums over chunks. A norm would not do: the opposite gradient has the same, and
rounding hides small changes. A checksum such as CRC-32 takes ten times as long as sums, which are as fast as memory.
Only what cancels out within a chunk of a large gradient is not found, such as two of its lanes that change places.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from kvstore.dynamo import outside_graphs
from workers.common.tensors import as_bits, in_memory_order
from workers.common.torch_internals import flatten, write_count

# Lanes of eight bytes in a chunk. It is odd, so that the opposite of a chunk has another sum: the sign bit at the top
# of each lane adds 2^63, and an even number of these vanishes. Hardly an array has rows of so many elements, so rows
# that change places come into other chunks.
CHUNK = 1021
SMALL = 32 << 10  # bytes; to copy so few takes no longer than to sum them


class Watcher(Protocol):
    """What is told of gradients."""

    def arrive(self, position: int) -> None:
        """Handle the gradient of the parameter at ``position``."""


class Hooks:
    """The hooks of parameters. They do not keep the watcher alive, and go with it.

    Args:
        watcher: the watcher. It is called in the thread that runs the parameter's part of backward, one per device.
        params: leaves, in the order of positions. Those that require no gradient now get no hook.

    Attributes:
        resting: whether the watcher should send nothing for now.
    """

    def __init__(self, watcher: Watcher, params: Sequence[torch.Tensor]) -> None:
        self.resting = False
        me = weakref.ref(watcher)
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


def _hook(me: weakref.ref[Watcher], position: int) -> Callable[[torch.Tensor], None]:
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
    """The gradients of one bucket at the moment of their push.

    Args:
        noted: whether ``written`` is to find writes that torch does not count.
    """

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
        """Return the position of a gradient whose elements are not those that were pushed, whoever wrote to it."""
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
