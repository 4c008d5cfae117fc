"""float16 and bfloat16: rounding to nearest, and what is beyond their range."""

from __future__ import annotations

import pytest
import torch
from coded import arrays, whole
from hypothesis import given

from kvstore.codecs import Compressor, parse


@given(arrays(special=False))
@pytest.mark.parametrize(("name", "bits", "least"), [("fp16", 11, 2.0**-25), ("bf16", 8, 2.0**-134)])
def test_halves_round_to_nearest(name: str, bits: int, least: float, values: torch.Tensor) -> None:
    values.clamp_(-65504, 65504)
    compression = parse({"type": name})
    arrived = whole(compression, Compressor(compression).encode("w", values))
    error = (arrived.double() - values.double()).abs()
    assert bool((error <= (values.double().abs() * 2.0**-bits).clamp(min=least)).all())


@pytest.mark.parametrize(("name", "top"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_overflow_is_clipped_counted_and_sent_later(name: str, top: float) -> None:
    compression = parse({"type": name})
    compressor = Compressor(compression)
    values = torch.zeros(100)
    values[3], values[4], values[5] = 1.5 * min(top, 2e38), -1.5 * min(top, 2e38), top
    if name == "bf16":
        values[3], values[4] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    there = whole(compression, compressor.encode("w", values))
    assert there[3:6].tolist() == [top, -top, top]
    assert compressor.statistics().clipped == 2
    again = whole(compression, compressor.encode("w", torch.zeros(100)))
    assert torch.equal(again[3:5], (values[3:5] - there[3:5]).to(torch.float16 if name == "fp16" else torch.bfloat16))
