"""The interface of a codec: elements into payloads and back. Codecs keep no state; see ``Compressor`` for that.

A payload is the encoding of a range of a key's flattened elements, in a flat uint8 tensor. What a codec chooses or
computes from the whole key, such as the largest elements or the factors of a matrix, it does once, for all ranges. Bits
and blocks are counted from the start of the key. So the ranges of a key, however it is divided, decode to the same bits
as all of it. The payload of an empty range is empty.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from kvstore.errors import UsageError, WireError
from kvstore.spec import Key

CHUNK = 1 << 16  # elements at a time: 256 KiB of float32, so that what one operation writes the next finds in the cache

Native: TypeAlias = Any  # a numpy array on the CPU, else a tensor

_KEPT = 1 << 18  # elements; more is not kept between calls

_mine = threading.local()  # threads that use different stores encode at the same time

RESIDUAL, VELOCITY, STEP = "residual", "velocity", "step"  # what they are called in messages


class Noise:
    """Random numbers, which only the seed, the key and the number of its encoding decide."""

    def __init__(self, seed: int, key: Key, step: int) -> None:
        digest = hashlib.blake2b(f"{seed}/{key!r}/{step}".encode(), digest_size=8).digest()
        self._words = np.random.SFC64(int.from_bytes(digest, "little"))

    def fill(self, out: torch.Tensor) -> None:
        """Make all of ``out``, flat float32, uniform between 0 and 1, in steps of 2^-16.

        On the CPU four come from one random word, which is five times as fast as torch's own. Other devices have
        other numbers.
        """
        if on_host(out):
            words = self._words.random_raw(-(-out.numel() // 4)).view(np.int16)[: out.numel()]
            out.copy_(torch.from_numpy(words)).mul_(2.0**-16).add_(0.5 + 2.0**-17)
        else:
            word = int(self._words.random_raw())
            out.uniform_(generator=torch.Generator(out.device).manual_seed(word >> 1))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(np.random.Generator(self._words).standard_normal(shape, dtype=np.float32))

    def uniform(self, count: int) -> torch.Tensor:
        return torch.from_numpy(np.random.Generator(self._words).random(count))


@dataclass
class Memo:
    """The state of one key.

    Attributes:
        velocity: flat float32: the momentum of the elements that have not been sent; None without momentum.
        basis: the last right factor of PowerSGD, float32 of shape (rank, columns); None before the first.
    """

    key: Key
    residual: torch.Tensor  # flat float32: the error of the encodings so far
    step: int = 0
    velocity: torch.Tensor | None = None
    basis: torch.Tensor | None = None

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """What messages have of it: its own tensors, by name."""
        step = torch.tensor(self.step, dtype=torch.int64, device="cpu")
        velocity = {} if self.velocity is None else {VELOCITY: self.velocity}
        return {RESIDUAL: self.residual, STEP: step, **velocity}

    def noise(self, seed: int) -> Noise:
        return Noise(seed, self.key, self.step)

    def to(self, device: torch.device) -> None:
        self.residual = self.residual.to(device)
        self.velocity = None if self.velocity is None else self.velocity.to(device)
        self.basis = None if self.basis is None else self.basis.to(device)


def scratch(name: str, like: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Return a flat, uninitialized float32 tensor on the device of ``like``.

    It belongs to the caller until the same thread asks for the same ``name`` again.
    """
    size = like.numel() if size is None else size
    if not like.is_cpu or size > _KEPT:  # CUDA's allocator keeps memory itself
        return torch.empty(size, dtype=torch.float32, device=like.device)
    kept: dict[str, torch.Tensor] = _mine.__dict__
    room = kept.get(name)
    if room is None or room.numel() < size:
        room = kept[name] = torch.empty(size, dtype=torch.float32, device="cpu")
    return room if room.numel() == size else room[:size]


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def native(tensor: torch.Tensor) -> Native:
    """Return a numpy array over the tensor's memory, or the tensor itself if it is on another device."""
    return tensor.numpy() if on_host(tensor) else tensor


def extremes(values: torch.Tensor) -> tuple[float, float]:
    if on_host(values):
        array = values.numpy()
        return float(array.min()), float(array.max())
    low, high = torch.aminmax(values)
    return float(low), float(high)


class Encoded(ABC):
    """The encoding of a key's elements, and the payloads of ranges of them."""

    def __init__(self, size: int) -> None:
        self.size = size

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
        single: whether the code of an element depends on no other element, so that several arrays may be encoded as
            one.
    """

    whole: ClassVar[bool] = False  # whether it must see all elements of a key at once
    single: ClassVar[bool] = False

    @abstractmethod
    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """Return an encoding to put the elements of an array in."""

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


def _nothing(target: torch.Tensor, add: bool) -> None: ...


def chunks(items: torch.Tensor, per: int = 1) -> Sequence[torch.Tensor]:
    """Return flat ``items``, each of which stands for ``per`` elements, in chunks: where there are many, by one call.

    On other devices they are one chunk.
    """
    length, count = CHUNK // per, items.numel()
    if count <= length or not on_host(items):
        return (items,) if count else ()
    full, rest = divmod(count, length)
    return items.split_with_sizes([length] * full + [rest] * bool(rest))  # torch's split is slower: it is Python


def put_or_add(values: torch.Tensor, target: torch.Tensor, add: bool) -> None:
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
    """Return the bytes of contiguous ``parts``, back to back; parts of uint8 are flat."""
    flat = [part if part.dtype == torch.uint8 else part.reshape(-1).view(torch.uint8) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
