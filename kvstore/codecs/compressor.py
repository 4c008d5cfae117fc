"""The sending end: encodes, and keeps what the encoding lacks for the next one.

Error feedback (arXiv:1901.09847), here and nowhere else: what is encoded is the values and the residual; the new
residual is that less what the receiver makes of the payload, which is found by the receiver's own code. So what has
arrived, over any number of rounds, and the residual together are what was to be sent, up to float32's rounding. The
same holds on the way back, with a compressor on the server (DoubleSqueeze, arXiv:1905.05957).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvstore.codecs.base import Encoded, chunks
from kvstore.codecs.memo import Memo
from kvstore.codecs.options import Compression
from kvstore.codecs.table import codec
from kvstore.codecs.work import Statistics, Work, Works
from kvstore.errors import Mismatch, UsageError
from kvstore.spec import Key, check_key
from kvstore.values.finite import all_finite

_KEPT = ("residual", "velocity", "basis")


class Compressor:
    """Encodes arrays by key. One thread at a time.

    Args:
        compression: how.
        name: what errors call a key; by default what it is.
    """

    def __init__(self, compression: Compression, name: Callable[[Any], Key] | None = None) -> None:
        self.compression = compression
        self._name = name
        self._codec = codec(compression)
        self._momentum = float(compression.number("momentum") or 0.0)
        self._memos: dict[Key, Memo] = {}
        self._joints: dict[tuple[Key, ...], _Joint] = {}
        self._done = Statistics()

    @property
    def joins(self) -> bool:
        """Whether arrays can be encoded as one, to the same bits; see ``encode_joined``."""
        return self._codec.single and not self._momentum

    def encode(self, key: Key, values: torch.Tensor, works: Works | None = None) -> Encoded:
        """Return the encoding of ``values`` and of what earlier ones of ``key`` have lacked.

        Args:
            key: any; a server may use the ids of its segments.
            values: floating point, on any device, of the same size each time; float64 is rounded to float32. Its shape
                matters to ``powersgd`` only.
            works: what an exception has ended goes on from where it was if it is called again with the same ``works``,
                and what has come to its end is returned again.

        Raises:
            UsageError: integers; or elements that are infinite or NaN in float32, and what was kept of ``key`` is
                dropped.
            Mismatch: another size than before.
        """
        self._require_floating(key, values)
        work = None if works is None else works.get((key,))
        if work is None:
            flat = _flat(values)
            memo = self._memo(key, flat)
            velocity = None if memo.velocity is None else torch.mul(memo.velocity, self._momentum).add_(flat)
            flat = flat if velocity is None else velocity
            encoded = self._codec.begin(values.shape, flat.device, memo)
            work = Work(encoded, flat, memo.residual, [memo], velocity)
            if works is not None:
                works[key,] = work
        if not self._complete(work, values):
            self.drop(key)
            raise self._infinite(key)
        return work.encoded

    def encode_joined(
        self, keys: Sequence[Key], sizes: Sequence[int], values: torch.Tensor, works: Works | None = None
    ) -> Encoded:
        """Return one encoding of several arrays, of what those of ``encode`` would be, back to back: if it ``joins``.

        Args:
            keys: theirs.
            sizes: theirs.
            values: of all, one after the other.
            works: as for ``encode``.

        Raises:
            UsageError: as from ``encode``; what was kept of all these keys is dropped.
            Mismatch: as from ``encode``.
        """
        self._require_floating(keys[0], values)
        work = None if works is None else works.get(tuple(keys))
        if work is None:
            flat = _flat(values)
            joint = self._joint(tuple(keys), list(sizes), flat)
            encoded = self._codec.begin(flat.shape, flat.device, Memo(keys[0], joint.residual))
            work = Work(encoded, flat, joint.residual, joint.memos, None)
            if works is not None:
                works[tuple(keys)] = work
        if not self._complete(work, values):
            parts = _flat(values).split_with_sizes(list(sizes))
            unfit = next(
                (key for key, part in zip(keys, parts, strict=True) if not all_finite(part, torch.float32)), keys[0]
            )
            for key in keys:
                self.drop(key)
            raise self._infinite(unfit)
        return work.encoded

    def once(self, key: Key, values: torch.Tensor) -> Encoded:
        """Return the encoding of ``values`` alone; nothing is kept. See ``encode`` for arguments and errors."""
        self._require_floating(key, values)
        self.require_finite(key, values)
        flat = values.detach().reshape(-1)
        encoded = self._codec.begin(values.shape, flat.device, Memo(key, torch.empty(0)))
        for number, part in enumerate((flat,) if self._codec.whole and flat.numel() else chunks(flat)):
            encoded.put(number, part.float())
        encoded.finish()
        self._done = self._counted(1, values, encoded)
        return encoded

    def require_finite(self, key: Key, values: torch.Tensor) -> None:
        """Raise ``UsageError`` unless all ``values`` are finite in float32."""
        if not all_finite(values, torch.float32):
            raise self._infinite(key)

    def drop(self, key: Key) -> None:
        """Forget what is kept of ``key``."""
        self._memos.pop(key, None)

    def statistics(self) -> Statistics:
        """Return what has been done so far."""
        return self._done

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return what is kept: tensors on the CPU that nothing changes, and plain data that goes with them."""
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
        """Take what ``state`` of another compressor returned, in place of all that is kept.

        Args:
            tensors, plain: what it returned.
            shapes: of all arrays that there are, by key, if that is known.

        Raises:
            Mismatch: it compressed otherwise.
            UsageError: it is no such state. Nothing has changed then.
        """
        if plain.get("compression") != self.compression.options():
            raise Mismatch(f"a state of {plain.get('compression')}, but here it is {self.compression.options()}")
        steps = plain.get("steps")
        if not isinstance(steps, list) or not all(_is_step(entry) for entry in steps):
            raise UsageError("a state without the keys and steps of a compressor")
        left = dict(tensors)
        memos = {}
        for i, (key, step) in enumerate(steps):
            kept = {name: left.pop(f"{name}.{i}", None) for name in _KEPT}
            memo = memos[check_key(key)] = self._rebuilt(key, step, kept)
            if shapes is not None and not _fits(memo, shapes.get(key)):
                raise UsageError(f"what is kept of key {key!r} is not of an array of shape {shapes.get(key)}")
        if left or len(memos) != len(steps):
            raise UsageError("a state with more tensors than keys, or a key twice")
        self._memos = memos
        self._joints.clear()

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
            raise UsageError(f"what is kept of key {key!r} is not what this compressor keeps")
        copies = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in (velocity, basis)]
        return Memo(key, residual.to("cpu", copy=True), step, *copies)

    def _memo(self, key: Key, flat: torch.Tensor) -> Memo:
        memo = self._memos.get(key)
        if memo is None:
            zeros = torch.zeros(flat.numel(), device=flat.device)
            memo = self._memos[key] = Memo(key, zeros, velocity=zeros.clone() if self._momentum else None)
        elif memo.residual.numel() != flat.numel():
            raise Mismatch(f"key {key!r} has {flat.numel()} elements, and had {memo.residual.numel()} before")
        elif memo.residual.device != flat.device:
            memo.to(flat.device)
        return memo

    def _joint(self, keys: tuple[Key, ...], sizes: list[int], flat: torch.Tensor) -> _Joint:
        """What is kept of ``keys``, back to back: from now on they share its memory."""
        joint = self._joints.get(keys)
        if (
            joint is None
            or joint.sizes != sizes
            or joint.residual.device != flat.device
            or not self._holds(joint, keys)
        ):
            memos = [self._memo(key, part) for key, part in zip(keys, flat.split_with_sizes(sizes), strict=True)]
            self._joints = {its: other for its, other in self._joints.items() if self._holds(other, its)}
            residual = torch.cat([memo.residual for memo in memos])
            joint = self._joints[keys] = _Joint(sizes, residual, residual.split_with_sizes(sizes), memos)
            for memo, part in zip(memos, joint.parts, strict=True):
                memo.residual = part
        return joint

    def _holds(self, joint: _Joint, keys: Sequence[Key]) -> bool:
        """Whether what is kept of ``keys`` is still what they share."""
        return all(
            self._memos.get(key) is memo and memo.residual is part
            for key, memo, part in zip(keys, joint.memos, joint.parts, strict=True)
        )

    def _complete(self, work: Work, values: torch.Tensor) -> bool:
        """Do what is left of ``work``; False if its values are not finite. May be called again after any exception."""
        if work.over:
            return True
        if not (work.take_whole() if self._codec.whole else work.take_chunks()):
            return False
        if work.velocity is not None and work.velocity.numel():
            work.encoded.clear(work.velocity)
        work.encoded.finish()
        if work.done is None:
            work.done = self._counted(len(work.memos), values, work.encoded)
        self._done = work.done
        work.keep()
        return True

    def _require_floating(self, key: Key, values: torch.Tensor) -> None:
        if not values.is_floating_point():
            raise UsageError(f"key {self._called(key)!r} is {values.dtype}; compression is for floating point only")

    def _infinite(self, key: Key) -> UsageError:
        return UsageError(f"key {self._called(key)!r} has infinite or NaN elements, which cannot be compressed")

    def _called(self, key: Key) -> Key:
        return key if self._name is None else self._name(key)

    def _counted(self, arrays: int, values: torch.Tensor, encoded: Encoded) -> Statistics:
        done = self._done
        return Statistics(
            done.arrays + arrays,
            done.bytes_in + values.numel() * values.itemsize,
            done.bytes_out + encoded.nbytes,
            done.clipped + encoded.clipped,
        )


class _Joint(NamedTuple):
    """Residuals of several keys, back to back, and the parts of that which they are."""

    sizes: list[int]
    residual: torch.Tensor
    parts: Sequence[torch.Tensor]
    memos: Sequence[Memo]


def _flat(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    return flat.float() if flat.dtype == torch.float64 else flat


def _fits(memo: Memo, shape: tuple[int, ...] | None) -> bool:
    """Whether what is kept can be of an array of ``shape``; None if there is no such array."""
    if shape is None or memo.residual.numel() != math.prod(shape):
        return False
    return memo.basis is None or memo.basis.shape[1] * math.prod(shape[:1]) == memo.residual.numel()


def _is_step(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and type(entry[1]) is int and 0 <= entry[1] < 2**63
