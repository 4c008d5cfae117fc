"""The codec of a description, and the receiver's functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from kvstore import wire
from kvstore.codecs.codec import CheckedPayload, Codec
from kvstore.codecs.options import Compression
from kvstore.codecs.powersgd import PowerSGD
from kvstore.codecs.quantization import BFloat16, Float16, Int8, OneBit, TwoBit
from kvstore.codecs.selection import RandomK, Threshold, TopK
from kvstore.errors import WireError
from kvstore.values import from_buffer

_CODECS: dict[str, Callable[[Compression], Codec]] = {
    "fp16": lambda _: Float16(),
    "bf16": lambda _: BFloat16(),
    "2bit": lambda c: TwoBit(c.number("threshold")),
    "1bit": lambda c: OneBit(c.number("threshold")),
    "topk": lambda c: TopK(c.number("ratio"), c.number("k"), c.number("warmup_steps")),
    "threshold": lambda c: Threshold(c.number("threshold")),
    "randomk": lambda c: RandomK(c.number("ratio"), c.number("k"), c.number("seed")),
    "int8": lambda c: Int8(c.number("stochastic"), c.number("seed")),
    "powersgd": lambda c: PowerSGD(c.number("rank"), c.number("seed")),
}


@functools.lru_cache(maxsize=64)
def codec(compression: Compression) -> Codec:
    return _CODECS[compression.type](compression)


def decode(compression: Compression, payload: torch.Tensor, count: int) -> torch.Tensor:
    """Return the elements of ``payload`` as flat float32.

    Raises:
        WireError: ``payload`` is not the payload of ``count`` elements.
    """
    out = torch.empty(count, dtype=torch.float32, device="cpu")
    codec(compression).check(payload, count).write(out, False)
    return out


def check_payloads(
    compression: Compression, message: wire.Push | wire.Values, sizes: Sequence[int]
) -> list[tuple[int, CheckedPayload]]:
    """Return the payloads of a message, each with the number of its elements.

    Raises:
        WireError: the payloads are not those of these segments.
    """
    counts = message.segment_counts or [1] * len(message.lengths)
    if sum(counts) != len(sizes) or len(counts) != len(message.lengths):
        raise WireError(f"{len(message.lengths)} payloads of {sum(counts)} segments, where there are {len(sizes)}")
    ends = itertools.accumulate(counts)
    totals = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    payloads = wire.unpack_arrays(message.buffers, message.lengths)
    return [
        (total, codec(compression).check(from_buffer(payload, "uint8"), total))
        for total, payload in zip(totals, payloads, strict=True)
    ]
