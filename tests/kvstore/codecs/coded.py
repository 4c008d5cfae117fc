"""What the tests of codecs share: one description of each kind, arrays that are hard on them, and both ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from kvstore.codecs import Compression, Encoded, decode, parse
from kvstore.codecs.described import codec

OPTIONS: list[dict[str, object]] = [
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit", "threshold": 0.0},
    {"type": "topk", "ratio": 0.1},
    {"type": "topk", "k": 7, "momentum": 0.9, "warmup_steps": 3},
    {"type": "threshold", "threshold": 1.0},
    {"type": "threshold", "threshold": 1.0, "momentum": 0.5},
    {"type": "randomk", "ratio": 0.2, "seed": 3},
    {"type": "int8"},
    {"type": "int8", "stochastic": True, "seed": 1},
    {"type": "powersgd", "rank": 2},
]
NAMES = ["-".join(str(value) for value in options.values()) for options in OPTIONS]
COMPRESSIONS: list[Compression] = [parse(options) for options in OPTIONS]
SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1e-44, -1e-40, 65504.0, 65519.0, 1e6, -1e6, 1e30]

sizes = st.integers(0, 70) | st.sampled_from([255, 256, 257, 511, 513, 1000, 65535, 65536, 65537, 70001])


@st.composite
def arrays(draw: st.DrawFn, special: bool = True) -> torch.Tensor:
    """A flat float32 array of some size and magnitude, with zeros, ties and, if ``special``, extreme values."""
    size = draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(size, generator=generator) * 10.0 ** draw(st.integers(-6, 4))
    if draw(st.booleans()):
        values = values.round(decimals=1)
    if draw(st.booleans()):
        values[torch.rand(size, generator=generator) < 0.7] = 0.0
    if special and size:
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
            values[draw(st.integers(0, size - 1))] = value
    return values


def whole(compression: Compression, encoded: Encoded) -> torch.Tensor:
    """What one server makes of all of it."""
    return decode(compression, encoded.payload(0, encoded.size), encoded.size)


def write(compression: Compression, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    codec(compression).check(payload, out.numel()).write(out, add)


def in_parts(compression: Compression, encoded: Encoded, cuts: Sequence[int]) -> torch.Tensor:
    """What several servers make of it, cut at ``cuts``."""
    edges = [0, *sorted(cuts), encoded.size]
    parts = [decode(compression, encoded.payload(*pair), pair[1] - pair[0]) for pair in itertools.pairwise(edges)]
    return torch.cat(parts)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two float32 arrays agree to the last bit."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
