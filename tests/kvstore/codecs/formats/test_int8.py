"""int8: errors of at most half a scale, or of a scale and right on average."""

from __future__ import annotations

import math

import numpy as np
import torch
from coded import arrays, whole
from hypothesis import given

from kvstore.codecs import Compressor, decode, parse

BLOCK = 256


def largest_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """For every element the largest magnitude of its block."""
    magnitudes = values.abs().numpy()
    most = [magnitudes[i : i + BLOCK].max() for i in range(0, len(magnitudes), BLOCK)]
    return torch.from_numpy(np.repeat(np.array(most, dtype=np.float64), BLOCK)[: len(magnitudes)])


@given(arrays())
def test_int8_is_within_half_a_scale_and_stochastic_within_one(values: torch.Tensor) -> None:
    for stochastic, share in ((False, 0.5), (True, 1.0)):
        compression = parse({"type": "int8", "stochastic": stochastic})
        arrived = whole(compression, Compressor(compression).encode("w", values))
        scale = largest_of_blocks(values) / 127
        error = (arrived.double() - values.double()).abs()
        assert bool((error <= scale * share * (1 + 1e-5) + 2e-43).all())


def test_stochastic_rounding_is_right_on_average() -> None:
    compression = parse({"type": "int8", "stochastic": True})
    values = torch.linspace(-1, 1, 250)
    rounds = 400
    total = torch.zeros(250)
    for key in range(rounds):  # each key is new: nothing is kept
        total += whole(compression, Compressor(compression).encode(key, values))
    assert float((total / rounds - values).abs().max()) < 4 * (1 / 127) * 0.5 / math.sqrt(rounds)


def test_what_decodes_is_finite_where_scales_are_large() -> None:
    compression = parse({"type": "int8"})
    values = torch.full((300,), torch.finfo(torch.float32).max)
    there = decode(compression, Compressor(compression).encode("w", values).payload(0, 300), 300)
    assert bool(torch.isfinite(there).all())
    assert float((there / values).min()) > 0.95
