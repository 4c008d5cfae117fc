"""The base of codecs that encode each element alone, or each small block of elements alone: payloads of planes.

A plane is a flat tensor, of which each item stands for a fixed number of elements: one float16 for each, one byte of
signs for eight, one scale for 256. The payload of a range has the items of the first plane that the range needs, then
those of the next plane. If a block has several elements, a last byte follows: how many elements of the first block come
before the range. Blocks begin at multiples of their length from the start of the key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from kvstore.codecs.base import (
    CheckedPayload,
    Codec,
    Encoded,
    chunks,
    concatenated_bytes,
    put_or_add,
    require_bytes,
    typed,
)
from kvstore.codecs.memo import Memo
from kvstore.codecs.noise import Noise
from kvstore.codecs.scratch import scratch
from kvstore.errors import WireError

_BYTES = torch.arange(
    256, dtype=torch.uint8, device="cpu"
)  # a slice of length one is that byte as a tensor, without a copy


class Plane(NamedTuple):
    """A plane: the dtype of its items, and how many elements each item stands for, ``per``."""

    dtype: torch.dtype
    per: int

    def items(self, count: int) -> int:
        """Return how many items the first ``count`` elements have."""
        return -(-count // self.per)


class PlaneCodec(Codec):
    """A codec of elements in blocks.

    Attributes:
        planes: of a payload, in order; those of larger items come first, for their alignment.
        block: how many elements a block has.
    """

    planes: ClassVar[tuple[Plane, ...]]

    def __init__(self) -> None:
        self.block = max(plane.per for plane in self.planes)

    def noise(self, memo: Memo) -> Noise | None:
        """Return the random numbers that ``pack`` needs."""
        return None

    @abstractmethod
    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """Encode ``values``, which begin with a block, into ``planes``; return how many were clipped."""

    @abstractmethod
    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode the first elements of ``planes``, which begin with a block, into all of ``out``."""

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> int:
        """``pack``, and write the error to ``left``: ``values`` less what ``unpack`` returns for ``planes``."""
        clipped = self.pack(values, planes, noise)
        torch.sub(values, self._decoded(planes, values), out=left)
        return clipped

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add to all of ``out`` what ``unpack`` would write there."""
        out.add_(self._decoded(planes, out))

    def _decoded(self, planes: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        out = scratch("decoded", like)
        self.unpack(planes, out)
        return out

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        """Raise ``WireError`` if ``planes`` have items that ``pack`` never writes."""

    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """See ``Codec``."""
        return _Planes(self, shape.numel(), device, self.noise(memo))

    def _check(self, payload: torch.Tensor, count: int) -> CheckedPayload:
        before = int(payload[-1]) if self.block > 1 and payload.numel() else 0
        if before >= self.block:
            raise WireError(f"a payload that begins {before} elements into a block of {self.block}, which has no more")
        sizes = [plane.items(before + count) * plane.dtype.itemsize for plane in self.planes]
        require_bytes(payload, sum(sizes) + (self.block > 1), count)
        planes, start = [], 0
        for plane, size in zip(self.planes, sizes, strict=True):
            planes.append(typed(payload[start : start + size], plane.dtype))
            start += size
        self.check_planes(planes)
        return _CheckedPlanes(self, planes, before)

    def write(self, planes: Sequence[torch.Tensor], before: int, target: torch.Tensor, add: bool) -> None:
        """Decode the elements of ``planes`` from ``before`` on into all of ``target``, or add them to it."""
        if before:
            head = min(self.block, before + target.numel())
            decoded = torch.empty(head, dtype=torch.float32, device="cpu")
            self.unpack(self.slices(planes, 0, head), decoded)
            put_or_add(decoded[before:], target[: head - before], add)
            target = target[head - before :]
            planes = [items[self.block // plane.per :] for plane, items in zip(self.planes, planes, strict=True)]
        write = self.add if add else self.unpack
        for part, items in zip(chunks(target), self.chunks(planes), strict=True):
            write(items, part)

    def spread(self, planes: Sequence[torch.Tensor], before: int, targets: Sequence[torch.Tensor]) -> None:
        """``write`` to ``targets``, one after the other."""
        for target in targets:
            skipped = before - before % self.block
            self.write(self.slices(planes, skipped, before + target.numel()), before - skipped, target, False)
            before += target.numel()

    def chunks(self, planes: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return the items of ``planes``, which begin with a block, for each chunk of elements."""
        return zip(*(chunks(items, plane.per) for plane, items in zip(self.planes, planes, strict=True)), strict=True)

    def slices(self, planes: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
        """Return the items of ``planes`` for elements ``start``, where a block begins, to ``stop``."""
        return [
            items if not start and items.numel() == plane.items(stop) else items[start // plane.per : plane.items(stop)]
            for plane, items in zip(self.planes, planes, strict=True)
        ]


class _CheckedPlanes(CheckedPayload):
    def __init__(self, codec: PlaneCodec, planes: Sequence[torch.Tensor], before: int) -> None:
        super().__init__(partial(codec.write, planes, before))
        self._codec, self._planes, self._before = codec, planes, before

    def spread(self, targets: Sequence[torch.Tensor]) -> None:
        """See ``CheckedPayload``."""
        self._codec.spread(self._planes, self._before, targets)


class _Planes(Encoded):
    def __init__(self, codec: PlaneCodec, size: int, device: torch.device, noise: Noise | None) -> None:
        super().__init__(size)
        self._codec, self._noise = codec, noise
        self._planes = [torch.empty(plane.items(size), dtype=plane.dtype, device=device) for plane in codec.planes]
        self._chunks = list(codec.chunks(self._planes))
        self._clipped: dict[int, int] = {}  # by chunk

    @property
    def clipped(self) -> int:
        return sum(self._clipped.values())

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.itemsize for plane in self._planes) + (self._codec.block > 1 and self.size > 0)

    def put(self, number: int, values: torch.Tensor) -> None:
        self._clipped[number] = self._codec.pack(values, self._chunks[number], self._noise)

    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        self._clipped[number] = self._codec.take(values, self._chunks[number], self._noise, left)

    def finish(self) -> None:
        self._planes = [plane.cpu() for plane in self._planes]
        self._chunks.clear()

    def _payload(self, start: int, stop: int) -> torch.Tensor:
        before = start % self._codec.block
        parts = self._codec.slices(self._planes, start - before, stop)
        if self._codec.block > 1:
            parts.append(_BYTES[before : before + 1])
        return concatenated_bytes(parts)
