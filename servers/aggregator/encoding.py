"""Compression at an aggregator: the sum of a host's gradients is encoded once, with error feedback.

What encodings have left out stays here, by segment, and goes with the next sum. It belongs to no single worker. So
when workers save and load their optimizer's states, one worker of the host saves all of it, and what they load is added
up: it does not matter which of them held which part of it before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvstore import wire
from kvstore.codecs import Compressor
from kvstore.codecs.codec import RESIDUAL, STEP, VELOCITY, Memo
from kvstore.codecs.compressor import EncodedSum
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described
from kvstore.errors import UsageError, WireError
from kvstore.optim.states import SegmentState, pack_states, unpack_states
from kvstore.spec import Key
from kvstore.values import all_finite


class Encoding:
    """The compression of one store at one aggregator.

    Args:
        key: returns the key of a segment, by its id. Raises ``UsageError`` if there is no such segment.
        size: likewise, how many elements the segment has.
        keeper: the rank of the worker that saves the residuals, for all of this host; None for whoever asks.
    """

    def __init__(self, key: Callable[[int], Key], size: Callable[[int], int], keeper: int | None = None) -> None:
        self._key, self._size, self._keeper = key, size, keeper
        self._compressor: Compressor | None = None  # that of the last encoding
        self._loaded: dict[int, dict[int, Memo]] = {}  # by worker and segment, until the segment is encoded

    def encode(
        self,
        codec: wire.CodecDescription,
        ids: Sequence[int],
        sizes: Sequence[int],
        values: torch.Tensor,
        workers: int = 1,
    ) -> EncodedSum:
        """Return the encoding of a sum, plus what earlier encodings of its segments lack. Each call counts.

        Args:
            codec: how to encode the gradient of one worker; see ``Push.encode``.
            sizes: how many elements each segment has.
            values: the sum, flat and of floating point, one segment after the other.
            workers: of how many workers' gradients it is the sum.

        Raises:
            UsageError: the codec is unknown; or some values are infinite or NaN. Nothing has changed then.
        """
        compressor = self._compressor_of(codec, workers)
        if not all_finite(values, torch.float32):
            for number, part in zip(ids, values.split_with_sizes(list(sizes)), strict=True):
                compressor.require_finite(number, part)
        self._compressor = compressor
        self._take_loaded(compressor, ids)
        return compressor.encode_segments(ids, sizes, values)

    def decode(self, codec: wire.CodecDescription, reply: wire.Values, sizes: Sequence[int], out: torch.Tensor) -> None:
        """Write the values of a compressed reply to ``out``, flat, one segment after the other, in their dtype."""
        compression = described(codec)
        if compression is None:
            raise WireError("expected compressed values, got a reply to a request for plain ones")
        target = out if out.dtype == torch.float32 else torch.empty(out.numel(), dtype=torch.float32, device="cpu")
        start = 0
        for size, payload in check_payloads(compression, reply, sizes):
            payload.write(target[start : start + size], False)
            start += size
        if target is not out:
            out.copy_(target)

    def kept(self, number: int) -> Memo | None:
        """Return what the encodings of a segment lack; None if it has neither been encoded nor loaded."""
        return self._loaded_sum(number) or (None if self._compressor is None else self._compressor.kept(number))

    def get_states(self, message: wire.GetStates) -> wire.OptimizerStates:
        """Return what the encodings of the message's segments lack; nothing to workers other than the keeper."""
        states: list[SegmentState] = []
        for number in message.ids if self._keeper in (None, message.node.rank) else ():
            memo = self.kept(number)
            if memo is not None:
                states += [SegmentState(number, name, value.clone()) for name, value in memo.states.items()]
        return wire.OptimizerStates(message.seq, optimizer=None, **pack_states(states))

    def put_states(self, message: wire.PutStates) -> None:
        """Replace what the encodings of the message's segments lack by the sum of all that workers load.

        It counts together with what other workers load before the segment is encoded again.
        """
        states: dict[int, dict[str, torch.Tensor]] = {}
        for number, name, value in unpack_states(message):
            states.setdefault(number, {})[name] = value.clone()
        memos = {number: self._memo(number, tensors) for number, tensors in states.items()}
        self._loaded.setdefault(message.node.rank, {}).update(memos)

    def _compressor_of(self, codec: wire.CodecDescription, workers: int) -> Compressor:
        """Return the compressor for a sum: the last one; or where the codec is another, one that goes on from there."""
        compression = described(codec)
        if compression is None:
            raise UsageError("expected a type of compression, got none")
        compression = compression.of_sum(workers)
        before = self._compressor
        if before is not None and before.compression == compression:
            return before
        compressor = Compressor(compression, self._key)
        if before is not None:
            compressor.inherit(before)
        return compressor

    def _take_loaded(self, compressor: Compressor, ids: Sequence[int]) -> None:
        if not self._loaded:
            return
        for number in ids:
            memo = self._loaded_sum(number)
            if memo is not None:
                compressor.keep(memo)
                for memos in self._loaded.values():
                    memos.pop(number, None)
        self._loaded = {rank: memos for rank, memos in self._loaded.items() if memos}

    def _loaded_sum(self, number: int) -> Memo | None:
        """Return the sum of all that workers have loaded for a segment, in the order of ranks; None if none has."""
        loaded = [memos[number] for _, memos in sorted(self._loaded.items()) if number in memos]
        if not loaded:
            return None
        total = Memo(number, torch.zeros_like(loaded[0].residual))
        for memo in loaded:
            total.residual.add_(memo.residual)
            total.step = max(total.step, memo.step)
            if memo.velocity is not None:
                total.velocity = memo.velocity if total.velocity is None else total.velocity + memo.velocity
        return total

    def _memo(self, number: int, states: dict[str, torch.Tensor]) -> Memo:
        size, empty = self._size(number), torch.empty(0, dtype=torch.float32, device="cpu")
        residual, step, velocity = states.get(RESIDUAL, empty), states.get(STEP, empty), states.get(VELOCITY)
        floats = [residual] if velocity is None else [residual, velocity]
        if (
            not states.keys() <= {RESIDUAL, STEP, VELOCITY}
            or not all(tensor.shape == (size,) and tensor.dtype == torch.float32 for tensor in floats)
            or not all(all_finite(tensor, torch.float32) for tensor in floats)
            or (step.shape, step.dtype) != ((), torch.int64)
            or int(step) < 0
        ):
            raise UsageError(
                f"key {self._key(number)!r}: expected the residual of a compression for {size} elements, got "
                + (", ".join(f"{name} of shape {list(tensor.shape)}" for name, tensor in states.items()) or "nothing")
            )
        return Memo(number, residual, int(step), velocity)
