"""The interface of a codec: elements into payloads and back. Codecs keep no state; see ``Compressor`` for that.

A payload is the encoding of a range of a key's flattened elements, in a flat uint8 tensor. What a codec chooses or
computes from the whole key, such as the largest elements or the factors of a matrix, it does once, for all ranges. Bits
and blocks are counted from the start of the key. So the ranges of a key, however it is divided, decode to the same bits
as all of it. The payload of an empty range is empty.
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
    """The encoding of a key's elements, and the payloads of ranges of them.

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

    def payload(self, start: int, stop: int) -> torch.Tensor:
        """Return the payload of elements ``start`` to ``stop``: uint8, on the CPU; it may share this one's memory.

        Raises:
            UsageError: there are no such elements.
        """
        if not 0 <= start <= stop <= self.size:
            raise UsageError(f"elements {start} to {stop} were asked for, of {self.size}")
        return self._payload(start, stop) if start < stop else torch.empty(0, dtype=torch.uint8, device="cpu")

    @abstractmethod
    def _payload(self, start: int, stop: int) -> torch.Tensor:
        """``payload`` of at least one element."""

    @abstractmethod
    def put(self, number: int, values: torch.Tensor) -> None:
        """Encode flat float32 ``values``, chunk ``number`` of the elements; all of them if the codec is ``whole``."""

    @abstractmethod
    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        """``put``, and write to ``left``, which may be ``values``, the error of the encoding. May be repeated."""

    @abstractmethod
    def finish(self) -> None:
        """Move what ``payload`` needs to the CPU. May be repeated."""

    def clear(self, values: torch.Tensor) -> None:
        """Make ``values``, one for each element, zero where an element was chosen to be sent."""
        raise AssertionError("this codec chooses no elements")


class CheckedPayload:
    """A payload that has passed all checks. It can be decoded any number of times, into flat float32 on the CPU.

    Args:
        write: decodes it into a tensor of its size; if its second argument is True, adds to what is there.
    """

    def __init__(self, write: Callable[[torch.Tensor, bool], None]) -> None:
        self.write = write

    def spread(self, targets: Sequence[torch.Tensor]) -> None:
        """Decode it into ``targets``, one after the other; together they have its size."""
        if len(targets) == 1:
            self.write(targets[0], False)
            return
        sizes = [target.numel() for target in targets]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        self.write(flat, False)
        for target, part in zip(targets, flat.split_with_sizes(sizes), strict=True):
            target.copy_(part)


class Codec(ABC):
    """One way to encode.

    Attributes:
        whole: whether it must see all elements of a key at once.
        single: whether the code of an element depends on no other element, so that several arrays may be encoded as
            one.
    """

    whole: ClassVar[bool] = False
    single: ClassVar[bool] = False

    @abstractmethod
    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """Return an encoding to put the elements of an array in.

        Args:
            shape: the array's.
            device: where the values will be.
            memo: of the key.
        """

    def check(self, payload: torch.Tensor, count: int) -> CheckedPayload:
        """Return ``payload``, checked.

        The check covers all that could read outside the payload's memory, or demand more memory or time than the
        elements justify.

        Raises:
            WireError: it is not the payload of ``count`` elements.
        """
        if count:
            return self._check(payload, count)
        require_bytes(payload, 0, 0)
        return CheckedPayload(_nothing)

    @abstractmethod
    def _check(self, payload: torch.Tensor, count: int) -> CheckedPayload:
        """``check`` of at least one element."""


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


def concatenated_bytes(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of contiguous ``parts``, back to back; those of uint8 are flat."""
    flat = [part if part.dtype == torch.uint8 else part.reshape(-1).view(torch.uint8) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
