"""One encoding. An exception may interrupt it anywhere; a repeated call goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvstore.codecs.base import Encoded, chunks
from kvstore.codecs.memo import Memo
from kvstore.codecs.scratch import scratch
from kvstore.spec import Key
from kvstore.values.finite import all_finite

_TOP = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class CompressionStatistics:
    """What a compressor has done.

    Attributes:
        arrays: how often it has encoded.
        bytes_in: of the arrays, as they came.
        bytes_out: of their payloads, uncut.
        clipped: elements that were beyond what the encoding can hold.
    """

    arrays: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    clipped: int = 0


class ResumableEncoding:
    """One encoding in the making.

    Args:
        encoded: is given the elements.
        values: flat, to be encoded together with the residual.
        residual: flat float32: the memory of one memo, or of several.
        memos: of the keys whose arrays are encoded.
        velocity: the new momentum; None without momentum.

    Attributes:
        statistics: the compressor's after this encoding; None until that is known.
        complete: whether nothing is left to do.
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
        self.statistics: CompressionStatistics | None = None
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
