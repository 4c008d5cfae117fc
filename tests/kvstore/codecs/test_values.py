"""What arrives: near enough, and what does not arrive is kept to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from coded import COMPRESSIONS, NAMES, arrays, same_bits, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compression, Compressor, add, assign, decode, parse
from kvstore.errors import Mismatch, UsageError

BLOCK = 256


def residual(compressor: Compressor, i: int = 0) -> torch.Tensor:
    return compressor.state()[0][f"residual.{i}"]


def largest_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """For every element the largest magnitude of its block."""
    magnitudes = values.abs().numpy()
    most = [magnitudes[i : i + BLOCK].max() for i in range(0, len(magnitudes), BLOCK)]
    return torch.from_numpy(np.repeat(np.array(most, dtype=np.float64), BLOCK)[: len(magnitudes)])


@given(arrays(special=False))
@pytest.mark.parametrize(("name", "bits", "least"), [("fp16", 11, 2.0**-25), ("bf16", 8, 2.0**-134)])
def test_halves_round_to_nearest(name: str, bits: int, least: float, values: torch.Tensor) -> None:
    values.clamp_(-65504, 65504)
    compression = parse({"type": name})
    arrived = whole(compression, Compressor(compression).encode("w", values))
    error = (arrived.double() - values.double()).abs()
    assert bool((error <= (values.double().abs() * 2.0**-bits).clamp(min=least)).all())


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


@given(arrays())
def test_bits_are_what_mxnet_says(values: torch.Tensor) -> None:
    two, one = parse({"type": "2bit", "threshold": 0.5}), parse({"type": "1bit", "threshold": 0.25})
    ups, downs = values >= 0.5, values <= -0.5
    assert torch.equal(whole(two, Compressor(two).encode("w", values)), 0.5 * (ups.float() - downs.float()))
    assert torch.equal(whole(one, Compressor(one).encode("w", values)), torch.where(values > 0.25, 1.0, -1.0))


@given(arrays(), arrays(), st.sampled_from(COMPRESSIONS))
def test_what_arrives_and_what_is_kept_are_what_was_there(
    first: torch.Tensor, second: torch.Tensor, compression: Compression
) -> None:
    # Exact for all that send elements as they are, or round them to nearest: the error is then a float32. Fixed steps,
    # as of 1bit and 2bit, and products of factors leave what float32 must round, by half a unit of its last place.
    exact = compression.type in ("fp16", "bf16", "topk", "threshold", "randomk") or (
        compression.type == "int8" and not compression.number("stochastic")
    )
    second = second[: first.numel()]
    first = first[: second.numel()]
    if compression.type == "fp16":
        first, second = first.clamp(-(2.0**28), 2.0**28), second.clamp(-(2.0**28), 2.0**28)
    compressor = Compressor(compression)
    for values in (first, second):
        kept = residual(compressor) if compressor.statistics().arrays else torch.zeros_like(values)
        velocity = compressor.state()[0].get("velocity.0", torch.zeros_like(values))
        momentum = compression.number("momentum")
        came = velocity * momentum + values if momentum else values
        encoded = compressor.encode("w", values)
        given_in = (kept + came).double()
        arrived = whole(compression, encoded).double()
        now = residual(compressor).double()
        if exact:
            assert torch.equal(arrived + now, given_in)
        else:
            assert bool(((arrived + now - given_in).abs() <= now.abs() * 2.0**-24 + 2.0**-149).all())


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 31, 33, 257])
def test_any_length_goes(compression: Compression, size: int) -> None:
    values = torch.arange(size, dtype=torch.float32) - size / 3
    encoded = Compressor(compression).encode("w", values)
    payload = encoded.payload(0, size)
    assert payload.dtype == torch.uint8
    assert payload.numel() == encoded.nbytes
    out = torch.full((size,), 2.0)
    add(compression, payload, out)
    assert torch.equal(out, decode(compression, payload, size) + 2.0)
    assign(compression, payload, out)
    assert same_bits(out, decode(compression, payload, size))
    assert encoded.payload(size, size).numel() == 0
    assert decode(compression, encoded.payload(size // 2, size // 2), 0).shape == (0,)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_taken_as_float32(compression: Compression, dtype: torch.dtype) -> None:
    values = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = values.clone()
    there = whole(compression, Compressor(compression).encode("w", values.requires_grad_()))
    assert same_bits(there, whole(compression, Compressor(compression).encode("w", before.float())))
    assert torch.equal(values, before)


def test_strides_do_not_matter() -> None:
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    compression = parse({"type": "fp16"})
    there = whole(compression, Compressor(compression).encode("w", values.T))
    assert torch.equal(there, values.T.reshape(-1).half().float())


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_what_was_kept_is_dropped(compression: Compression, bad: float) -> None:
    compressor, values = Compressor(compression), torch.ones(70000)
    compressor.encode("w", values)
    compressor.encode("v", values)
    values[66000] = bad
    with pytest.raises(UsageError, match="'w' has infinite or NaN"):
        compressor.encode("w", values)
    assert compressor.state()[1]["steps"] == [["v", 1]]


def test_a_sum_that_overflows_is_no_infinity() -> None:
    compression = parse({"type": "bf16"})
    values = torch.full((1000,), 2.0**127)
    assert torch.equal(whole(compression, Compressor(compression).encode("w", values)), values)


def test_integers_and_other_sizes_are_refused() -> None:
    compressor = Compressor(parse({"type": "2bit"}))
    with pytest.raises(UsageError, match=r"'w' is torch\.int64"):
        compressor.encode("w", torch.ones(3, dtype=torch.int64))
    compressor.encode("w", torch.ones(3))
    with pytest.raises(Mismatch, match="4 elements, and had 3"):
        compressor.encode("w", torch.ones(4))
    compressor.drop("w")
    compressor.encode("w", torch.ones(4))


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


def test_statistics() -> None:
    compressor = Compressor(parse({"type": "2bit"}))
    compressor.encode("w", torch.ones(8, 100))
    compressor.encode("w", torch.ones(8, 100, dtype=torch.float64))
    done = compressor.statistics()
    assert (done.arrays, done.bytes_in, done.bytes_out, done.clipped) == (2, 3200 + 6400, 2 * 201, 0)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"type": "fp16"}, 2),
        ({"type": "bf16"}, 2),
        ({"type": "2bit"}, 16 / 1.01),
        ({"type": "1bit"}, 32 / 1.01),
        ({"type": "topk", "ratio": 0.01}, 45),
        ({"type": "randomk", "ratio": 0.01}, 45),
        ({"type": "int8"}, 3.9),
        ({"type": "powersgd", "rank": 4}, 60),
    ],
)
@pytest.mark.parametrize("size", [100_000, 400_000])
def test_payloads_are_as_small_as_promised(options: dict[str, object], least: float, size: int) -> None:
    values = torch.randn(size // 500, 500, generator=torch.Generator().manual_seed(1))
    encoded = Compressor(parse(options)).encode("w", values)
    least = min(least, size // (size // 500 + 500) / 4.01) if options["type"] == "powersgd" else least
    assert 4 * size / encoded.payload(0, size).numel() >= least
    assert encoded.payload(0, size).numel() == encoded.nbytes
