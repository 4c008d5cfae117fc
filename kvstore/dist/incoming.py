"""From the wire into the caller's arrays: takes the values of pieces as they come, whatever device and strides wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kvstore.dist.plans import Plan, parts_of
from kvstore.dist.parcels import Parcel, Stretch
from kvstore.values import Run, crossed, cut, from_host, runs_of, spread, without_grad
from kvstore.wire import Values

Decode: TypeAlias = Callable[[Values, Sequence[torch.Tensor]], None]  # into flat float32, one after the other


class Writer:
    """Writes arrays from the replies of the servers that hold their values.

    Args:
        plan: of the keys.
        outs: for each key the arrays to write into, or, with ``plain``, just one.
        plain: the arrays are contiguous CPU tensors.
        copy: if False, let plain arrays become the values themselves where these came in one stretch of memory.
    """

    def __init__(
        self, plan: Plan, outs: Sequence[Sequence[torch.Tensor] | torch.Tensor], plain: bool, copy: bool
    ) -> None:
        self._entries = plan.entries
        self._lengths = plan.lengths
        self._replies = len(plan.parcels)
        self._outs = outs
        self._plain = plain
        self._copy = copy
        self._staged: dict[int, torch.Tensor] = {}  # by position: arrays that are written when all of them is here
        self._here: dict[int, dict[int, int]] = {}  # by position, how many elements of those are, by where they begin
        self._moving: set[torch.cuda.Stream] = set()
        self._taken: set[int] = set()  # replies

    def disturbs(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether ``values``, one for each key, can change before they are sent, because others are written already."""
        outs: Sequence[Any] = self._outs
        if self._plain:
            if len(values) == 1:
                return bool(0 < abs(values[0].data_ptr() - outs[0].data_ptr()) < self._lengths[0])
            return crossed(values, outs, lengths=self._lengths)
        owners = [position for position, its in enumerate(outs) for _ in its]
        return crossed(values, [out for its in outs for out in its], owners)

    def take(self, parcel: Parcel, reply: Values, decode: Decode | None = None) -> None:
        """Write what a reply has of ``parcel``. May be called again for the same one.

        Args:
            decode: writes compressed values; None for values as they are.
        """
        without_grad(self._take, parcel, reply, decode)
        self._taken.add(reply.seq)
        if len(self._taken) == self._replies:  # copies to devices go on while other replies come
            for stream in self._moving:
                stream.synchronize()

    def _take(self, parcel: Parcel, reply: Values, decode: Decode | None) -> None:
        if decode is not None and self._plain and self._copy and parcel.dtype == "float32":
            outs: Sequence[torch.Tensor] = self._outs  # type: ignore[assignment]
            decode(reply, parts_of(parcel, outs))
            return
        runs = _runs(parcel, reply, decode)
        if self._plain:
            self._write_plain(parcel, runs)
        else:
            self._write(parcel, runs)

    def _write_plain(self, parcel: Parcel, runs: Sequence[Run]) -> None:
        outs: Sequence[torch.Tensor] = self._outs  # type: ignore[assignment]
        sizes = [stretch.stop - stretch.start for stretch in parcel.stretches]
        if len(runs) == 1:
            if self._copy:
                spread(runs[0].values, sizes, parts_of(parcel, outs))
            else:
                self._share(parcel.stretches, torch.split_with_sizes(runs[0].values, sizes))
            return
        at = 0
        for out, size in zip(parts_of(parcel, outs), sizes, strict=True):
            for run in cut(runs, at, at + size):
                out[run.start : run.stop] = run.values
            at += size

    def _share(self, stretches: Sequence[Stretch], parts: Sequence[torch.Tensor]) -> None:
        for (position, start, stop, whole), part in zip(stretches, parts, strict=True):
            out: torch.Tensor = self._outs[position]  # type: ignore[assignment]
            if whole:
                out.data = part.view(out.shape)
            else:
                out.view(-1)[start:stop] = part

    def _write(self, parcel: Parcel, runs: Sequence[Run]) -> None:
        at = 0
        for position, start, stop, _ in parcel.stretches:
            for run in cut(runs, at, at + stop - start):
                self._write_part(position, start + run.start, run.values)
            at += stop - start

    def _write_part(self, position: int, start: int, part: torch.Tensor) -> None:
        size, outs = self._entries[position].spec.size, self._outs[position]
        stop = start + part.numel()
        if stop - start == size:
            self._moving |= from_host(part, list(outs))
            return
        plain = [out.view(-1)[start:stop] for out in outs if out.is_contiguous()]
        self._moving |= from_host(part, plain)
        if len(plain) < len(outs):  # strides have no flat view: collect the parts first
            staged = self._staged.get(position)
            if staged is None:
                staged = self._staged[position] = torch.empty(size, dtype=part.dtype)
            staged[start:stop] = part
            here = self._here.setdefault(position, {})
            here[start] = part.numel()
            if sum(here.values()) == size:
                strided = [out for out in outs if not out.is_contiguous()]
                self._moving |= from_host(staged, strided)


def _runs(parcel: Parcel, reply: Values, decode: Decode | None) -> Sequence[Run]:
    if decode is None:
        return runs_of(reply.buffers, parcel.dtype, parcel.size)
    flat = torch.empty(parcel.size)
    decode(reply, [flat])
    return [Run(0, flat.to(getattr(torch, parcel.dtype)))]
