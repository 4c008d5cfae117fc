"""The sender: it encodes arrays, and keeps the error of each encoding for the next one.

Error feedback (arXiv:1901.09847) is here and nowhere else. A compressor encodes the sum of the values and the residual.
The new residual is that sum less what the receiver decodes, which the receiver's own code computes. So over any number
of rounds, all that was decoded and the residual add up to all that was given, up to float32's rounding. A server does
the same with the values that it sends (DoubleSqueeze, arXiv:1905.05957).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from kvstore import wire
from kvstore.codecs.codec import Encoded, Memo, chunks, scratch
from kvstore.codecs.described import codec
from kvstore.codecs.options import Compression, travelling
from kvstore.errors import Mismatch, UsageError
from kvstore.spec import Key, check_key
from kvstore.values import to_buffer
from kvstore.values.any_arrays import all_finite

_KEPT = ("residual", "velocity", "basis")

_TOP = torch.finfo(torch.float32).max


class ResumableEncoding:
    """One encoding in the making.

    Args:
        values: flat, to be encoded together with the residual.
        residual: flat float32: the memory of one memo, or of several.
        velocity: the new momentum; None without momentum.
    """

    def __init__(
        self,
        encoded: Encoded,
        values: torch.Tensor,
        residual: torch.Tensor,
        memos: Sequence[Memo],
        velocity: torch.Tensor | None,
    ) -> None:
        self.encoded = encoded
        self.memos = memos
        self.velocity = velocity
        self.complete = False
        self._values = values
        self._residual = residual
        self._steps = [memo.step + 1 for memo in memos]
        self._next_chunk = 0
        self._sum: tuple[int, torch.Tensor] | None = None  # a chunk's number, and its values plus its residual
        self._left: torch.Tensor | None = None  # the new residual, where the codec is ``whole``

    def take_chunks(self) -> bool:
        """Encode chunk by chunk; return False if the values are not finite.

        The sum of a chunk lies in memory of its own until the chunk is done, so that overwriting the residual can be
        repeated.
        """
        for number, (residual, given) in enumerate(zip(chunks(self._residual), chunks(self._values), strict=True)):
            if number < self._next_chunk:
                continue
            if self._sum is None or self._sum[0] != number:
                total = scratch("total", residual)
                if not _add(residual, given, total):
                    return False
                self._sum = number, total
            self.encoded.take(number, self._sum[1], residual)
            self._next_chunk = number + 1
        return True

    def take_whole(self) -> bool:
        """Encode all at once; return False if the values are not finite."""
        if self._left is None and self._values.numel():
            total = torch.empty_like(self._residual)
            if not _add(self._residual, self._values, total):
                return False
            self.encoded.take(0, total, total)
            self._left = total
        return True

    def keep(self) -> None:
        """Update the memos: step, residual and momentum."""
        for memo, step in zip(self.memos, self._steps, strict=True):
            memo.step = step
            if self._left is not None:
                memo.residual = self._left
            if self.velocity is not None:
                memo.velocity = self.velocity
        self.complete = True
        self._values = self._residual = torch.empty(0, dtype=torch.float32, device="cpu")
        self._sum = self._left = self.velocity = None


ResumableEncodings: TypeAlias = dict[tuple[Key, ...], ResumableEncoding]  # of one push, by keys


def _add(residual: torch.Tensor, given: torch.Tensor, total: torch.Tensor) -> bool:
    """Write the sum to ``total``, clamped to float32's range; return False if ``given`` is not finite."""
    torch.add(residual, given, out=total)
    if not all_finite(total, torch.float32):
        if not all_finite(given, torch.float32):
            return False
        total.clamp_(-_TOP, _TOP)
    return True


class EncodedSum(NamedTuple):
    """The fields of a push that has an encoded sum; see ``Push``."""

    codec: wire.CodecDescription
    lengths: list[int]
    segment_counts: list[int]
    buffers: list[wire.Buffer]


class Compressor:
    """Encodes arrays by key. One thread at a time."""

    def __init__(self, compression: Compression, name: Callable[[Any], Key] | None = None) -> None:
        self.compression = compression
        self._name = name
        self._codec = codec(compression)
        self._momentum = float(compression.number("momentum") or 0.0)
        self._memos: dict[Key, Memo] = {}
        self._shared: dict[tuple[Key, ...], _SharedResidual] = {}

    @property
    def joins(self) -> bool:
        """Whether arrays can be encoded as one, to the same bits; see ``encode_joined``."""
        return self._codec.single and not self._momentum

    def encode(self, key: Key, values: torch.Tensor, resumable: ResumableEncodings | None = None) -> Encoded:
        """Return the encoding of ``values`` plus the residual of ``key``.

        Args:
            key: any; a server may use the ids of its segments.
            values: floating point, on any device, of the same size each time; float64 is rounded to float32. The shape
                matters to ``powersgd`` only.
            resumable: the encodings of one push. A call that an exception has interrupted may be repeated with the same
                ``resumable``: it goes on from there, and an encoding that was complete is returned again.

        Raises:
            UsageError: the values are integers; or some are infinite or NaN in float32, which drops the residual.
            Mismatch: the size differs from the last one.
        """
        self._require_floating(key, values)
        encoding = None if resumable is None else resumable.get((key,))
        if encoding is None:
            flat = _flat(values)
            memo = self._memo(key, flat)
            velocity = None if memo.velocity is None else torch.mul(memo.velocity, self._momentum).add_(flat)
            flat = flat if velocity is None else velocity
            encoded = self._codec.begin(values.shape, flat.device, memo)
            encoding = ResumableEncoding(encoded, flat, memo.residual, [memo], velocity)
            if resumable is not None:
                resumable[key,] = encoding
        if not self._complete(encoding):
            self.drop(key)
            raise self._infinite(key)
        return encoding.encoded

    def encode_joined(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        values: torch.Tensor,
        resumable: ResumableEncodings | None = None,
    ) -> Encoded:
        """Return one encoding of several arrays, back to back. Call it only if this compressor ``joins``.

        It decodes to the same bits as the encodings that ``encode`` makes of the single arrays.

        Raises:
            UsageError: see ``encode``; the residuals of all these keys are dropped.
            Mismatch: see ``encode``.
        """
        self._require_floating(keys[0], values)
        encoding = None if resumable is None else resumable.get(tuple(keys))
        if encoding is None:
            flat = _flat(values)
            shared = self._share(tuple(keys), list(sizes), flat)
            encoded = self._codec.begin(flat.shape, flat.device, Memo(keys[0], shared.residual))
            encoding = ResumableEncoding(encoded, flat, shared.residual, shared.memos, None)
            if resumable is not None:
                resumable[tuple(keys)] = encoding
        if not self._complete(encoding):
            parts = _flat(values).split_with_sizes(list(sizes))
            unfit = next(
                (key for key, part in zip(keys, parts, strict=True) if not all_finite(part, torch.float32)), keys[0]
            )
            for key in keys:
                self.drop(key)
            raise self._infinite(unfit)
        return encoding.encoded

    def encode_segments(self, ids: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> EncodedSum:
        """Return the encodings of segments, whose ``values`` lie back to back, as a push has them."""
        if self.joins:
            encodings, counts = [self.encode_joined(ids, sizes, values)], [len(ids)]
        else:
            parts = values.split_with_sizes(list(sizes))
            encodings, counts = [self.encode(*each) for each in zip(ids, parts, strict=True)], [1] * len(ids)
        payloads = [to_buffer(encoding.payload(0, encoding.size)) for encoding in encodings]
        lengths = [payload.nbytes for payload in payloads]
        return EncodedSum(travelling(self.compression), lengths, counts, wire.pack_arrays(payloads))

    def encode_without_feedback(self, key: Key, values: torch.Tensor) -> Encoded:
        """Return the encoding of ``values`` alone; no residual is used or kept. Else as ``encode``."""
        self._require_floating(key, values)
        self.require_finite(key, values)
        flat = values.detach().reshape(-1)
        encoded = self._codec.begin(
            values.shape, flat.device, Memo(key, torch.empty(0, dtype=torch.float32, device="cpu"))
        )
        for number, part in enumerate((flat,) if self._codec.whole and flat.numel() else chunks(flat)):
            encoded.put(number, part.float())
        encoded.finish()
        return encoded

    def require_finite(self, key: Key, values: torch.Tensor) -> None:
        """Raise ``UsageError`` unless all ``values`` are finite in float32."""
        if not all_finite(values, torch.float32):
            raise self._infinite(key)

    def drop(self, key: Key) -> None:
        self._memos.pop(key, None)

    def kept(self, key: Key) -> Memo | None:
        """Return what is kept of ``key``, None before its first encoding. The next encoding changes it."""
        return self._memos.get(key)

    def keep(self, memo: Memo) -> None:
        """Keep ``memo`` of its key, instead of what was kept. Its velocity counts only if this one has momentum."""
        velocity = memo.velocity
        if not self._momentum:
            velocity = None
        elif velocity is None:
            velocity = torch.zeros_like(memo.residual)
        self._memos[memo.key] = Memo(memo.key, memo.residual, memo.step, velocity)

    @property
    def memos(self) -> list[Memo]:
        return list(self._memos.values())

    def inherit(self, other: Compressor) -> None:
        """Take over what ``other`` keeps: what its encodings lack goes with the next ones of this compressor."""
        for memo in other.memos:
            self.keep(memo)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the state: copies of its tensors on the CPU, and plain data that goes with them."""
        tensors = {}
        for i, memo in enumerate(self._memos.values()):
            for name in _KEPT:
                kept: torch.Tensor | None = getattr(memo, name)
                if kept is not None:
                    tensors[f"{name}.{i}"] = kept.to("cpu", copy=True)
        steps = [[memo.key, memo.step] for memo in self._memos.values()]
        return tensors, {"compression": self.compression.options(), "steps": steps}

    def load_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        plain: Mapping[str, object],
        shapes: Mapping[Key, tuple[int, ...]] | None = None,
    ) -> None:
        """Replace the state by one that ``state`` returned.

        Args:
            shapes: of all arrays of the store, by key; None if they are not known.

        Raises:
            Mismatch: the state is that of another compression.
            UsageError: it is not the state of a compressor. Nothing has changed then.
        """
        if plain.get("compression") != self.compression.options():
            raise Mismatch(
                f"the state is of {plain.get('compression')}, but this store uses {self.compression.options()}"
            )
        steps = plain.get("steps")
        if not isinstance(steps, list) or not all(_is_step(entry) for entry in steps):
            raise UsageError("expected the state of a compressor, got one without a list of keys and steps")
        left = dict(tensors)
        memos = {}
        for i, (key, step) in enumerate(steps):
            kept = {name: left.pop(f"{name}.{i}", None) for name in _KEPT}
            memo = memos[check_key(key)] = self._rebuilt(key, step, kept)
            if shapes is not None and not _fits(memo, shapes.get(key)):
                raise UsageError(f"the state of key {key!r} does not fit an array of shape {shapes.get(key)}")
        if left or len(memos) != len(steps):
            raise UsageError("the state of a compressor has more tensors than keys, or a key twice")
        self._memos = memos
        self._shared.clear()

    def _rebuilt(self, key: Key, step: int, kept: Mapping[str, torch.Tensor | None]) -> Memo:
        residual, velocity, basis = (kept[name] for name in _KEPT)
        given = [tensor for tensor in (residual, velocity, basis) if tensor is not None]
        if (
            residual is None
            or residual.dim() != 1
            or not all(tensor.dtype == torch.float32 and all_finite(tensor, torch.float32) for tensor in given)
            or (velocity is None) == bool(self._momentum)
            or (velocity is not None and velocity.shape != residual.shape)
            or (basis is not None and (basis.dim() != 2 or basis.shape[0] != self.compression.number("rank")))
        ):
            raise UsageError(f"the state of key {key!r} is not one of {self.compression.type} compression")
        copies = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in (velocity, basis)]
        return Memo(key, residual.to("cpu", copy=True), step, *copies)

    def _memo(self, key: Key, flat: torch.Tensor) -> Memo:
        memo = self._memos.get(key)
        if memo is None:
            zeros = torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device)
            memo = self._memos[key] = Memo(key, zeros, velocity=zeros.clone() if self._momentum else None)
        elif memo.residual.numel() != flat.numel():
            raise Mismatch(f"key {key!r} has {flat.numel()} elements, and had {memo.residual.numel()} before")
        elif memo.residual.device != flat.device:
            memo.to(flat.device)
        return memo

    def _share(self, keys: tuple[Key, ...], sizes: list[int], flat: torch.Tensor) -> _SharedResidual:
        """Return the residuals of ``keys`` back to back; from now on the memos share that memory."""
        shared = self._shared.get(keys)
        if (
            shared is None
            or shared.sizes != sizes
            or shared.residual.device != flat.device
            or not self._holds(shared, keys)
        ):
            memos = [self._memo(key, part) for key, part in zip(keys, flat.split_with_sizes(sizes), strict=True)]
            self._shared = {group: other for group, other in self._shared.items() if self._holds(other, group)}
            residual = torch.cat([memo.residual for memo in memos])
            shared = self._shared[keys] = _SharedResidual(sizes, residual, residual.split_with_sizes(sizes), memos)
            for memo, part in zip(memos, shared.parts, strict=True):
                memo.residual = part
        return shared

    def _holds(self, shared: _SharedResidual, keys: Sequence[Key]) -> bool:
        """Whether the memos of ``keys`` still share the memory of ``shared``."""
        return all(
            self._memos.get(key) is memo and memo.residual is part
            for key, memo, part in zip(keys, shared.memos, shared.parts, strict=True)
        )

    def _complete(self, encoding: ResumableEncoding) -> bool:
        """Complete ``encoding``; return False if its values are not finite. May be called again after an exception."""
        if encoding.complete:
            return True
        if not (encoding.take_whole() if self._codec.whole else encoding.take_chunks()):
            return False
        if encoding.velocity is not None and encoding.velocity.numel():
            encoding.encoded.clear(encoding.velocity)
        encoding.encoded.finish()
        encoding.keep()
        return True

    def _require_floating(self, key: Key, values: torch.Tensor) -> None:
        if not values.is_floating_point():
            raise UsageError(f"key {self._called(key)!r} is {values.dtype}; compression is for floating point only")

    def _infinite(self, key: Key) -> UsageError:
        return UsageError(f"key {self._called(key)!r} has infinite or NaN elements, which cannot be compressed")

    def _called(self, key: Key) -> Key:
        return key if self._name is None else self._name(key)


class _SharedResidual(NamedTuple):
    """The residuals of several keys, back to back; ``parts`` are the views of single keys."""

    sizes: list[int]
    residual: torch.Tensor
    parts: Sequence[torch.Tensor]
    memos: Sequence[Memo]


def _flat(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return flat.float() if flat.dtype == torch.float64 else flat


def _fits(memo: Memo, shape: tuple[int, ...] | None) -> bool:
    """Whether ``memo`` can be that of an array of ``shape``; None if there is no such array."""
    if shape is None or memo.residual.numel() != math.prod(shape):
        return False
    return memo.basis is None or memo.basis.shape[1] * math.prod(shape[:1]) == memo.residual.numel()


def _is_step(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and type(entry[1]) is int and 0 <= entry[1] < 2**63
