"""One encoding while it is made: an exception may end it anywhere, and it goes on from there. Keeps what it lacks."""

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
class Statistics:
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


class Work:
    """One encoding, while it is made. Whatever ends that, it can go on.

    Args:
        encoded: takes it.
        values: flat, to be encoded with what is lacking.
        residual: flat float32, what is lacking: the memory of one memo, or of several.
        memos: what is kept of the keys.
        velocity: their new momentum; None without.

    Attributes:
        done: the compressor's statistics after it.
        over: whether all is done.
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
        self.done: Statistics | None = None
        self.over = False
        self._values = values
        self._residual = residual
        self._steps = [memo.step + 1 for memo in memos]
        self._chunk = 0  # that is next
        self._total: tuple[int, torch.Tensor] | None = None  # of a chunk: its values and what was lacking
        self._left: torch.Tensor | None = None  # what is lacking now, where the codec is whole

    def take_chunks(self) -> bool:
        """Encode chunk by chunk; False if the values are not finite.

        The residual of a chunk is overwritten from a sum that lies elsewhere, and stays there until that is done.
        """
        for number, (lacking, given) in enumerate(zip(chunks(self._residual), chunks(self._values), strict=True)):
            if number < self._chunk:
                continue
            if self._total is None or self._total[0] != number:
                total = scratch("total", lacking)
                if not _add(lacking, given, total):
                    return False
                self._total = number, total
            self.encoded.take(number, self._total[1], lacking)
            self._chunk = number + 1
        return True

    def take_whole(self) -> bool:
        """Encode all at once; False if the values are not finite."""
        if self._left is None and self._values.numel():
            total = torch.empty_like(self._residual)
            if not _add(self._residual, self._values, total):
                return False
            self.encoded.take(0, total, total)
            self._left = total
        return True

    def keep(self) -> None:
        """Let the memos have what is lacking, and all that follows from the encoding."""
        for memo, step in zip(self.memos, self._steps, strict=True):
            memo.step = step
            if self._left is not None:
                memo.residual = self._left
            if self.velocity is not None:
                memo.velocity = self.velocity
        self.over = True
        self._values = self._residual = torch.empty(0)
        self._total = self._left = self.velocity = None


Works: TypeAlias = dict[tuple[Key, ...], Work]  # encodings that are under way, or have been made, of one call


def _add(lacking: torch.Tensor, given: torch.Tensor, total: torch.Tensor) -> bool:
    """Write the sum to ``total``; False if ``given`` is not finite. A sum that is too large is the largest there is."""
    torch.add(lacking, given, out=total)
    if not all_finite(total, torch.float32):
        if not all_finite(given, torch.float32):
            return False
        total.clamp_(-_TOP, _TOP)
    return True
