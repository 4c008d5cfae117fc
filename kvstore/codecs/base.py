"""What a codec is: elements into payloads and back. Codecs keep nothing; see ``Compressor`` for what is kept.

A payload is the encoding of one segment, a contiguous range of a key's flattened elements, in a flat uint8 tensor.
Whatever is chosen or computed from the whole key (which elements are the largest, factors of the matrix) is so before
the cut, and bits and blocks stay where they are in the key: cut in any way, the decoded parts together are bit for bit
the decoded whole. A segment without elements has an empty payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from kvstore.codecs import host
from kvstore.codecs.memo import Memo
from kvstore.errors import UsageError, WireError

CHUNK = 1 << 16  # elements at a time: 256 KiB of float32, so that what one operation writes the next finds in the cache


class Encoded(ABC):
    """The encoding of a key's elements, of which segments are cut.

    Args:
        size: how many elements.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def clipped(self) -> int:
        """How many elements were beyond what the encoding can hold."""
        return 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the payload of all elements."""

    def cut(self, start: int, stop: int) -> torch.Tensor:
        """Return the payload of elements ``start`` to ``stop``: uint8, on the CPU; it may share this one's memory.

        Raises:
            UsageError: there are no such elements.
        """
        if not 0 <= start <= stop <= self.size:
            raise UsageError(f"elements {start} to {stop} of {self.size}")
        return self._cut(start, stop) if start < stop else torch.empty(0, dtype=torch.uint8)

    @abstractmethod
    def _cut(self, start: int, stop: int) -> torch.Tensor:
        """``cut`` of at least one element."""

    @abstractmethod
    def put(self, number: int, values: torch.Tensor) -> None:
        """Encode flat float32 ``values``, chunk ``number`` of the elements; all of them if the codec is ``whole``."""

    @abstractmethod
    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        """``put``, and write to ``left``, which may be ``values``, what their payload lacks. May be repeated."""

    @abstractmethod
    def finish(self) -> None:
        """Bring what ``cut`` needs to the CPU. May be repeated."""

    def clear(self, values: torch.Tensor) -> None:
        """Make ``values``, one for each element, zero where an element was chosen to be sent."""
        raise AssertionError("this codec chooses no elements")


class Opened:
    """A checked payload, which can be decoded as often as is wanted, into flat float32 on the CPU.

    Args:
        write: decodes all of it into a tensor of its size, or, if told so, adds it to what is there.
    """

    def __init__(self, write: Callable[[torch.Tensor, bool], None]) -> None:
        self.write = write

    def spread(self, targets: Sequence[torch.Tensor]) -> None:
        """Decode it into ``targets``, one after the other, which together have its size."""
        if len(targets) == 1:
            self.write(targets[0], False)
            return
        sizes = [target.numel() for target in targets]
        flat = torch.empty(sum(sizes))
        self.write(flat, False)
        for target, part in zip(targets, flat.split_with_sizes(sizes), strict=True):
            target.copy_(part)


class Codec(ABC):
    """One way to encode.

    Attributes:
        whole: whether it must see all elements of a key at once.
        single: whether what it makes of an element depends on nothing else, so that arrays may be encoded as one.
    """

    whole: ClassVar[bool] = False
    single: ClassVar[bool] = False

    @abstractmethod
    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """Return an encoding to put the elements of an array in.

        Args:
            shape: the array's.
            device: where the values will be.
            memo: what is kept for the key.
        """

    def open(self, payload: torch.Tensor, count: int) -> Opened:
        """Return what decodes ``payload``.

        Everything about it that could lead out of its memory, or ask for more than it is worth, is checked here.

        Raises:
            WireError: it is not one of ``count`` elements.
        """
        if count:
            return self._open(payload, count)
        require_bytes(payload, 0, 0)
        return Opened(_nothing)

    @abstractmethod
    def _open(self, payload: torch.Tensor, count: int) -> Opened:
        """``open`` of at least one element."""


def _nothing(target: torch.Tensor, add: bool) -> None:
    """Decode a payload of no elements."""


def chunks(items: torch.Tensor, per: int = 1) -> Sequence[torch.Tensor]:
    """Return flat ``items``, each of which stands for ``per`` elements, in chunks: where there are many, by one call.

    On other devices they are one chunk.
    """
    length, count = CHUNK // per, items.numel()
    if count <= length or not host.on_host(items):
        return (items,) if count else ()
    full, rest = divmod(count, length)
    return items.split_with_sizes([length] * full + [rest] * bool(rest))  # torch's split is slower: it is Python


def put_or_add(values: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    """Add ``values`` to ``target``, or copy them there."""
    if add:
        target.add_(values)
    else:
        target.copy_(values)


def require_bytes(payload: torch.Tensor, nbytes: int, count: int) -> None:
    """Raise ``WireError`` unless ``payload``, of ``count`` elements, has ``nbytes`` bytes."""
    if payload.numel() != nbytes:
        raise WireError(f"a payload of {payload.numel()} bytes where {count} elements have {nbytes}")


def typed(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of ``payload`` as ``dtype``: a view, or a copy where they are not aligned for it."""
    if payload.storage_offset() % dtype.itemsize or payload.data_ptr() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of contiguous ``parts``, back to back; those of uint8 are flat."""
    flat = [part if part.dtype == torch.uint8 else part.reshape(-1).view(torch.uint8) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
