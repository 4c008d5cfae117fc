"""One payload in several buffers: typed views that together hold its elements, cut and summed where they lie."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvstore.errors import WireError
from kvstore.spec import ITEMSIZE
from kvstore.values.arrays import from_buffer
from kvstore.values.reduce import sum_in_order
from kvstore.wire import Buffer


class Part(Protocol):
    """Elements ``start`` to ``stop`` of a payload, in whatever form."""

    @property
    def start(self) -> int:
        """Where it begins."""
        ...

    @property
    def stop(self) -> int:
        """Where it ends."""
        ...

    @property
    def values(self) -> torch.Tensor:
        """The elements, flat: where they lie, or new."""
        ...

    def cut(self, start: int, stop: int) -> Part:
        """Return what of it is from ``start`` to ``stop``, counted from ``start``."""
        ...

    def write(self, out: torch.Tensor, add: bool) -> None:
        """Write the elements into ``out``, or add them to what is there."""
        ...


class Run(NamedTuple):
    """Elements of a payload from ``start`` on: a flat tensor over one of its buffers."""

    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.values.numel()

    def cut(self, start: int, stop: int) -> Run:
        """See ``Part``."""
        return Run(max(self.start, start) - start, self.values[max(0, start - self.start) : stop - self.start])

    def write(self, out: torch.Tensor, add: bool) -> None:
        """See ``Part``."""
        if add:
            out.add_(self.values)
        else:
            out.copy_(self.values)


def runs_of(buffers: Sequence[Buffer], dtype: str, size: int) -> list[Run]:
    """Return the ``size`` elements that ``buffers`` hold together.

    Raises:
        WireError: they hold more or fewer, or one ends within an element.
    """
    itemsize, runs, start = ITEMSIZE[dtype], [], 0
    for buffer in buffers:
        length, rest = divmod(memoryview(buffer).nbytes, itemsize)
        if rest:
            raise WireError(f"a buffer that ends within an element of {dtype}")
        if length:
            runs.append(Run(start, from_buffer(buffer, dtype)))
            start += length
    if start != size:
        raise WireError(f"a payload of {start} elements where {size} belong")
    return runs


def cut(runs: Sequence[Part], start: int, stop: int) -> list[Part]:
    """Return elements ``start`` to ``stop``, counted from 0 again."""
    if len(runs) == 1 and start == 0 and stop == runs[0].stop:
        return [runs[0]]
    parts: list[Part] = []
    for run in runs[bisect_right(runs, start, key=_stop) :]:
        if run.start >= stop:
            break
        parts.append(run.cut(start, stop))
    return parts


def sum_runs(payloads: Sequence[Sequence[Part]], out: torch.Tensor) -> None:
    """Write the sum of ``payloads``, added from first to last, into ``out``, which they all have the size of."""
    starts = [run.start for run in payloads[0]]
    if all([run.start for run in runs] == starts for runs in payloads[1:]):
        for same in zip(*payloads, strict=True):
            _sum(same, out[same[0].start : same[0].stop])
        return
    edges = sorted({run.start for runs in payloads for run in runs} | {out.numel()})
    for start, stop in itertools.pairwise(edges):
        sum_in_order([cut(runs, start, stop)[0].values for runs in payloads], out=out[start:stop])


def _sum(parts: Sequence[Part], out: torch.Tensor) -> None:
    if all(type(part) is Run for part in parts):
        sum_in_order([part.values for part in parts], out=out)  # in one pass less
        return
    for number, part in enumerate(parts):
        part.write(out, number > 0)


def _stop(run: Part) -> int:
    return run.stop
