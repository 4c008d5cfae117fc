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

import numpy as np
import torch

from kvstore.codecs import codec
from kvstore.codecs.codec import (
    CheckedPayload,
    Codec,
    Encoded,
    Memo,
    Native,
    Noise,
    chunks,
    concatenated_bytes,
    extremes,
    native,
    put_or_add,
    require_bytes,
    scratch,
    typed,
)
from kvstore.errors import WireError

_BYTES = torch.arange(
    256, dtype=torch.uint8, device="cpu"
)  # a slice of length one is that byte as a tensor, without a copy


class Plane(NamedTuple):
    """A plane: the dtype of its items, and how many elements each item stands for, ``per``."""

    dtype: torch.dtype
    per: int

    def items(self, count: int) -> int:
        return -(-count // self.per)


class PlaneCodec(Codec):
    """A codec of elements in blocks. ``block``: how many elements a block has."""

    planes: ClassVar[
        tuple[Plane, ...]
    ]  # of a payload, in order; planes of larger items come first, for their alignment

    def __init__(self) -> None:
        self.block = max(plane.per for plane in self.planes)

    def noise(self, memo: Memo) -> Noise | None:
        return None

    @abstractmethod
    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> None:
        """Encode ``values``, which begin with a block, into ``planes``."""

    @abstractmethod
    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode the first elements of ``planes``, which begin with a block, into all of ``out``."""

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> None:
        """``pack``, and write the error to ``left``: ``values`` less what ``unpack`` returns for ``planes``."""
        self.pack(values, planes, noise)
        torch.sub(values, self._decoded(planes, values), out=left)

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
        self._codec.spread(self._planes, self._before, targets)


class _Planes(Encoded):
    def __init__(self, codec: PlaneCodec, size: int, device: torch.device, noise: Noise | None) -> None:
        super().__init__(size)
        self._codec, self._noise = codec, noise
        self._planes = [torch.empty(plane.items(size), dtype=plane.dtype, device=device) for plane in codec.planes]
        self._chunks = list(codec.chunks(self._planes))

    def put(self, number: int, values: torch.Tensor) -> None:
        self._codec.pack(values, self._chunks[number], self._noise)

    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        self._codec.take(values, self._chunks[number], self._noise, left)

    def finish(self) -> None:
        self._planes = [plane.cpu() for plane in self._planes]
        self._chunks.clear()

    def _payload(self, start: int, stop: int) -> torch.Tensor:
        before = start % self._codec.block
        parts = self._codec.slices(self._planes, start - before, stop)
        if self._codec.block > 1:
            parts.append(_BYTES[before : before + 1])
        return concatenated_bytes(parts)


# MXNet's one and two bits for each element: above or below; or up, down or neither.
#
# The error of a value is the value less a fixed step. It is exact if the step is a power of two and the value is of
# its order; else float32 rounds it, by up to half a unit of the last place.
#
# Two bits are two planes of one bit each, for ups and for downs, not codes side by side. Numpy compares into masks,
# packs masks and unpacks them ten times as fast as torch compares, or as a table is looked up. (Per chunk, on one
# core: numpy's greater, packbits and unpackbits 3 µs each; torch's gt 33 µs, index_select 30 µs; numpy's take 11 µs.)
_BITS = (128, 64, 32, 16, 8, 4, 2, 1)  # the first element has the highest bit, as in numpy


class _Signs(PlaneCodec):
    """A ``step`` up, a step down, or neither.

    A plane is a mask. The product of step and sign is exact, so every device computes the same. On the CPU masks and
    signs are numpy arrays, elsewhere tensors.
    """

    single = True
    step: float

    @abstractmethod
    def masks(self, values: torch.Tensor) -> list[Native]:
        """Return a bool for each of ``values`` for each plane."""

    @abstractmethod
    def signs(self, masks: Sequence[Native]) -> Native:
        """Return 1, -1 or 0 for each element of ``masks``, int8 of 0 and 1, which are overwritten."""

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> None:
        self._pack(values, planes)

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> None:
        self._add(self.signs([_bytes(mask) for mask in self._pack(values, planes)]), values, -self.step, left)

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(_tensor(self._unpacked_signs(planes, out)))
        if self.step != 1:
            out.mul_(self.step)

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._add(self._unpacked_signs(planes, out), out, self.step, out)

    def _pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor]) -> list[Native]:
        masks = self.masks(values)
        for mask, plane in zip(masks, planes, strict=True):
            pack_bits(mask, plane)
        return masks

    def _unpacked_signs(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> Native:
        count = out.numel()
        return self.signs([unpack_bits(plane, count) for plane in planes])

    @staticmethod
    def _add(signs: Native, values: torch.Tensor, step: float, out: torch.Tensor) -> None:
        # As floats first: torch's addition of integers to floats takes twice as long as both.
        torch.add(values, scratch("decoded", values).copy_(_tensor(signs)), alpha=step, out=out)


class OneBit(_Signs):
    """+1 above ``threshold``, else -1, as MXNet 2.0 has it, whatever ``threshold`` is."""

    planes = (Plane(torch.uint8, 8),)
    step = 1.0

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[Native]:
        return [native(values) > self.threshold]

    def signs(self, masks: Sequence[Native]) -> Native:
        (above,) = masks
        above += above
        above -= 1
        return above


class TwoBit(_Signs):
    """``threshold`` where a value reaches it, its negative where that is reached, else 0."""

    planes = (Plane(torch.uint8, 8), Plane(torch.uint8, 8))

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.step = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[Native]:
        array = native(values)
        return [array >= self.step, array <= -self.step]

    def signs(self, masks: Sequence[Native]) -> Native:
        ups, downs = masks
        ups -= downs
        return ups

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        if bool((native(planes[0]) & native(planes[1])).any()):
            raise WireError("a payload with elements that go both up and down")


def _tensor(flags: Native) -> torch.Tensor:
    return torch.from_numpy(flags) if isinstance(flags, np.ndarray) else flags


def _bytes(mask: Native) -> Native:
    return mask.view(np.int8 if isinstance(mask, np.ndarray) else torch.int8)


def pack_bits(mask: Native, out: torch.Tensor) -> None:
    """Write ``mask``, of bools, into the bytes of ``out``, eight to each; unused bits of the last byte are 0."""
    if isinstance(mask, np.ndarray):
        out.numpy()[:] = np.packbits(mask)
    else:
        pack_bits_anywhere(mask, out)


def pack_bits_anywhere(mask: torch.Tensor, out: torch.Tensor) -> None:
    """``pack_bits`` without numpy, for any device."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    torch.sum(bits * torch.tensor(_BITS, dtype=torch.uint8, device=mask.device), 1, dtype=torch.uint8, out=out)


def unpack_bits(packed: torch.Tensor, count: int) -> Native:
    """Return the first ``count`` bits of the bytes ``packed`` as int8, 0 or 1."""
    if codec.on_host(packed):
        return np.unpackbits(packed.numpy(), count=count).view(np.int8)
    return unpack_bits_anywhere(packed, count)


def unpack_bits_anywhere(packed: torch.Tensor, count: int) -> torch.Tensor:
    """``unpack_bits`` without numpy, for any device."""
    bits = packed.unsqueeze(1) & torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return (bits.view(-1)[:count] != 0).to(torch.int8)


# Half the bytes: float16, which is more precise, and bfloat16, which has float32's range.
#
# A value beyond the largest finite one is clipped to it. The rest is sent in later rounds, as any error
# is. Rounding to nearest leaves an error that float32 represents exactly, so nothing is lost: the rounded value and
# the error are multiples of the last place of the input (up to 2^29 for values that float16 clips).
class _Half(PlaneCodec):
    single = True

    def __init__(self) -> None:
        super().__init__()
        self._top = torch.finfo(self.planes[0].dtype).max

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> None:
        top = self._top
        low, high = extremes(values)
        if low < -top or high > top:
            values = torch.clamp(values, -top, top, out=scratch("clipped", values))
        planes[0].copy_(values)

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(planes[0])

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> None:
        self.pack(values, planes, noise)
        torch.sub(values, planes[0], out=left)

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.add_(planes[0])

    def write(self, planes: Sequence[torch.Tensor], before: int, target: torch.Tensor, add: bool) -> None:
        """See ``PlaneCodec``. One operation does all of it, so chunks would not help."""
        put_or_add(planes[0], target, add)

    def spread(self, planes: Sequence[torch.Tensor], before: int, targets: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(targets), planes[0].split_with_sizes([target.numel() for target in targets]))


class Float16(_Half):
    """IEEE half precision: 11 significant bits, up to 65504."""

    planes = (Plane(torch.float16, 1),)


class BFloat16(_Half):
    """The upper half of a float32: 8 significant bits."""

    planes = (Plane(torch.bfloat16, 1),)


# One byte for each element, and one float32 scale for 256 of them: 0.254 of float32's bytes.
#
# With 256 elements to a scale, the scales cost 1.6 %, and one large element makes few others imprecise. Rounding to
# nearest leaves an error of at most half a scale, which float32 represents exactly (a rounded value other than 0 is
# between half and twice its input: Sterbenz). Stochastic rounding (QSGD, arXiv:1610.02132) is unbiased in every
# round. Its error is up to one scale, and it costs random numbers.
BLOCK = 256
_LEVELS = 127
_MOST = 2.0**121  # the largest scale; 127 times as much is still a float32


class Int8(PlaneCodec):
    """Codes from -127 to 127: 127 for the largest magnitude of a block, 0 for zeros."""

    planes = (Plane(torch.float32, BLOCK), Plane(torch.int8, 1))

    def __init__(self, stochastic: bool, seed: int) -> None:
        super().__init__()
        self.stochastic, self.seed = stochastic, seed

    def noise(self, memo: Memo) -> Noise | None:
        return memo.noise(self.seed) if self.stochastic else None

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> None:
        scales, codes = planes
        quotients = scratch("quotients", values)
        for blocks, scale, quotient in _blocks(values, scales, quotients):
            torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=scale)
            scale.div_(_LEVELS).clamp_(max=_MOST)
            # Where a scale is 0, so are all values. Where it is tiny, quotients may be out of range, and are clamped.
            torch.div(blocks, (scale + (scale == 0)).unsqueeze(1), out=quotient)
        if noise is None:
            quotients.round_()
        else:
            drawn = scratch("noise", values)
            noise.fill(drawn)
            quotients.add_(drawn).floor_()
        codes.copy_(quotients.clamp_(-_LEVELS, _LEVELS))

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        scales, codes = planes
        out.copy_(codes[: out.numel()])
        for blocks, scale, _ in _blocks(out, scales, out):
            blocks.mul_(scale.unsqueeze(1))

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        low, high = extremes(planes[0])
        if not 0 <= low <= high <= _MOST:
            raise WireError(f"expected scales from 0 to {_MOST:g}, got a payload with scales from {low} to {high}")


def _blocks(
    values: torch.Tensor, scales: torch.Tensor, others: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield ``values``, their scales and ``others`` in rows of one block each: all full blocks, then the last one."""
    full = values.numel() // BLOCK
    edge = full * BLOCK
    if full:
        yield values[:edge].view(full, BLOCK), scales[:full], others[:edge].view(full, BLOCK)
    if edge < values.numel():
        yield values[edge:].view(1, -1), scales[full : full + 1], others[edge:].view(1, -1)
