"""The receiver: payloads of any length; those of strangers are refused, with the target as it was, or are harmless."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from coded import COMPRESSIONS, NAMES, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.codecs import CLOSE, Compression, Compressor, add, assign, decode, names, parse
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described, travelling
from kvstore.errors import UnknownName, UsageError, WireError
from kvstore.values import to_buffer


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


I32, F32, U8, I8 = torch.int32, torch.float32, torch.uint8, torch.int8


def payload_of(*parts: tuple[list[float], torch.dtype]) -> torch.Tensor:
    return torch.cat([torch.tensor(values, dtype=dtype).view(torch.uint8) for values, dtype in parts])


def try_both(compression: Compression, payload: torch.Tensor, count: int) -> None:
    for way in (assign, add):
        target = torch.full((count,), 3.0)
        try:
            way(compression, payload, target)
        except WireError:
            assert bool((target == 3.0).all())


@settings(max_examples=300)
@given(st.sampled_from(COMPRESSIONS), st.binary(max_size=300), st.integers(0, 600))
def test_noise(compression: Compression, noise: bytes, count: int) -> None:
    try_both(compression, torch.tensor(list(noise), dtype=torch.uint8), count)


@settings(max_examples=300)
@given(st.sampled_from(COMPRESSIONS), st.integers(0, 2000), st.integers(0, 2000), st.data())
def test_flipped_bytes_cut_ends_and_wrong_counts(
    compression: Compression, start: int, stop: int, data: st.DataObject
) -> None:
    start, stop = min(start, stop), max(start, stop)
    encoded = Compressor(compression).encode("w", torch.randn(40, 50, generator=torch.Generator().manual_seed(3)))
    payload = encoded.payload(start, stop).clone()
    for _ in range(data.draw(st.integers(0, 3))):
        if payload.numel():
            payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: payload.numel() - data.draw(st.integers(0, 9) | st.just(0))]
    count = data.draw(st.sampled_from([stop - start, stop - start + 1, max(0, stop - start - 1), 0, 10**5]))
    try_both(compression, payload, count)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_ends_that_are_missing_or_too_much(compression: Compression) -> None:
    encoded = Compressor(compression).encode("w", torch.randn(40, 50, generator=torch.Generator().manual_seed(3)))
    payload = encoded.payload(3, 1999)
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0]):
        sparse = compression.type in ("topk", "threshold", "randomk")
        with contextlib.nullcontext() if sparse and not wrong.numel() else pytest.raises(WireError, match="payload"):
            decode(compression, wrong, 1996)
    with pytest.raises(WireError, match="0 elements"):
        decode(compression, payload, 0)


@pytest.mark.parametrize(
    ("options", "payload", "count", "said"),
    [
        ({"type": "topk"}, payload_of(([5], I32), ([1.0], F32)), 5, "do not increase"),
        ({"type": "topk"}, payload_of(([-1], I32), ([1.0], F32)), 5, "do not increase"),
        ({"type": "topk"}, payload_of(([3, 3], I32), ([1.0, 1.0], F32)), 50, "do not increase"),
        ({"type": "randomk"}, payload_of(([4, 3], I32), ([1.0, 1.0], F32)), 50, "do not increase"),
        ({"type": "threshold"}, payload_of(([0, 1, 2], I32), ([1.0, 1.0, 1.0], F32)), 5, "24 bytes"),
        ({"type": "topk"}, payload_of(([2**31 - 1], I32), ([1.0], F32)), 100, "do not increase"),
        ({"type": "int8"}, payload_of(([float("nan")], F32), ([1, 2], I8), ([0], U8)), 2, "scales"),
        ({"type": "int8"}, payload_of(([float("inf")], F32), ([1, 2], I8), ([0], U8)), 2, "scales"),
        ({"type": "int8"}, payload_of(([-1.0], F32), ([1, 2], I8), ([0], U8)), 2, "scales"),
        ({"type": "int8"}, payload_of(([1.0], F32), ([1, 2], I8), ([255], U8)), 2, "7 bytes where 2"),
        ({"type": "2bit"}, payload_of(([128, 192, 0], U8)), 8, "both up and down"),
        ({"type": "2bit"}, payload_of(([0, 0, 8], U8)), 8, "8 elements into a block of 8"),
        ({"type": "1bit"}, payload_of(([0, 7], U8)), 2, "where 2 elements have 3"),
        ({"type": "powersgd"}, payload_of(([2**31 - 1, 2, 0], I32)), 10**6, "factors of 1 rows"),
        ({"type": "powersgd"}, payload_of(([0, 2, 0], I32)), 100, "0 columns"),
        ({"type": "powersgd"}, payload_of(([-5, 2, -9], I32)), 100, "-5 columns"),
        ({"type": "powersgd"}, payload_of(([10, 3, 0], I32)), 100, "rank 3"),
        ({"type": "powersgd"}, payload_of(([10, 0, 0], I32)), 100, "rank 0"),
        ({"type": "powersgd"}, payload_of(([10, 2, 10], I32)), 100, "10 elements into 10"),
        ({"type": "powersgd"}, payload_of(([10], I32)), 100, "4 bytes"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, object], payload: torch.Tensor, count: int, said: str) -> None:
    compression = parse(options)
    with pytest.raises(WireError, match=said):
        decode(compression, payload, count)
    try_both(compression, payload, count)


FP16 = parse({"type": "fp16"})
SIZES = [3, 0, 4]
VALUES = torch.arange(7, dtype=torch.float32)


def message(counts: list[int], sizes: list[int]) -> wire.Values:
    """A reply with payloads of so many elements each, which are of so many segments."""
    encoded, payloads, start = Compressor(FP16).encode("w", VALUES), [], 0
    for size in sizes:
        payloads.append(to_buffer(encoded.payload(start, start + size)))
        start += size
    lengths = [payload.nbytes for payload in payloads]
    return wire.Values(1, lengths=lengths, segment_counts=counts, buffers=wire.pack_arrays(payloads))


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [([], [3, 0, 4]), ([1, 1, 1], [3, 0, 4]), ([3], [7]), ([2, 1], [3, 4]), ([1, 2], [3, 4])],
    ids=str,
)
def test_each_payload_has_the_elements_of_its_segments(counts: list[int], sizes: list[int]) -> None:
    checked = check_payloads(FP16, message(counts, sizes), SIZES)
    assert [size for size, _ in checked] == sizes
    out = torch.empty(7)
    for (_, payload), part in zip(checked, out.split(sizes), strict=True):
        payload.write(part, False)
    assert torch.equal(out, VALUES)


@pytest.mark.parametrize(
    ("counts", "sizes", "words"),
    [
        ([2], [7], "1 payloads of 2 segments, where there are 3"),
        ([4], [7], "1 payloads of 4 segments"),
        ([], [7], "1 payloads of 1 segments"),
        ([2, 1], [7], "1 payloads of 3 segments"),
        ([1, 2], [4, 3], "a payload of 8 bytes where 3 elements have 6"),
    ],
)
def test_payloads_of_other_segments_are_refused(counts: list[int], sizes: list[int], words: str) -> None:
    with pytest.raises(WireError, match=words):
        check_payloads(FP16, message(counts, sizes), SIZES)


def test_frames_that_are_missing_are_refused() -> None:
    cut = message([3], [7])
    with pytest.raises(WireError, match="expected 1 frames"):
        check_payloads(FP16, wire.Values(1, lengths=cut.lengths, segment_counts=[3], buffers=[]), SIZES)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_a_description_travels(compression: Compression) -> None:
    assert parse(compression.options()) == compression


def test_every_type_has_defaults() -> None:
    for name in names():
        compression = parse({"type": name})
        assert compression.type == name
        assert compression.pull is None
    assert set(names()) >= CLOSE
    assert parse({"type": "2bit"}).number("threshold") == 0.5
    assert parse({"type": "topk"}).number("ratio") == 0.01
    assert parse({"type": "topk", "k": 3}).number("ratio") is None


def test_numbers_may_be_numpy_s() -> None:
    assert parse({"type": "2bit", "threshold": np.float32(0.5)}) == parse({"type": "2bit", "threshold": 0.5})
    assert parse({"type": "topk", "k": np.int64(3)}) == parse({"type": "topk", "k": 3})


def test_the_way_back_is_a_type_or_options() -> None:
    short = parse({"type": "2bit", "pull": "fp16"})
    assert short.pull == parse({"type": "fp16"})
    assert short == parse({"type": "2bit", "pull": {"type": "fp16"}})
    assert parse(short.options()) == short
    both = parse({"type": "topk", "k": 9, "pull": {"type": "topk", "ratio": 0.5}})
    assert both.pull is not None
    assert both.pull.number("ratio") == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "3bit"}, "choose from 1bit, 2bit, bf16, fp16, int8, powersgd, randomk, threshold, topk"),
        ({"type": 2}, "choose from 1bit"),
        ({"type": ["2bit"]}, "choose from 1bit"),
        ({"type": "2bit", "treshold": 0.5}, "choose from pull, threshold, type"),
        ({"type": "fp16", "threshold": 0.5}, "choose from pull, type"),
        ({"type": "2bit", "pull": "half"}, "no compression 'half'"),
    ],
)
def test_unknown_names_are_answered_with_the_known(options: dict[str, object], said: str) -> None:
    with pytest.raises(UnknownName, match=said):
        parse(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a 'type'"),
        ({"compression": "2bit"}, "needs a 'type'"),
        ({"type": "2bit", "threshold": 0}, "threshold=0 must be a number from"),
        ({"type": "2bit", "threshold": -1.0}, "threshold"),
        ({"type": "2bit", "threshold": "0.5"}, "threshold='0.5'"),
        ({"type": "2bit", "threshold": True}, "threshold=True"),
        ({"type": "1bit", "threshold": math.nan}, "threshold=nan"),
        ({"type": "1bit", "threshold": math.inf}, "threshold=inf"),
        ({"type": "threshold", "threshold": 0.0}, "threshold"),
        ({"type": "topk", "ratio": 0.0}, "ratio"),
        ({"type": "topk", "ratio": 1.5}, "ratio"),
        ({"type": "topk", "k": 0}, "k=0 must be an integer from 1"),
        ({"type": "topk", "k": 2.0}, "k=2.0 must be an integer"),
        ({"type": "randomk", "k": 2, "ratio": 0.5}, "give ratio or k, not both"),
        ({"type": "topk", "momentum": 1.0}, "momentum"),
        ({"type": "topk", "warmup_steps": -1}, "warmup_steps"),
        ({"type": "int8", "stochastic": 1}, "stochastic=1 must be True or False"),
        ({"type": "int8", "seed": 2**32}, "seed"),
        ({"type": "powersgd", "rank": 0}, "rank"),
        ({"type": "powersgd", "rank": 10**9}, "rank"),
        ({"type": "fp16", "pull": 16}, "compression must be a dict"),
        ({"type": "fp16", "pull": {"type": "fp16", "pull": "fp16"}}, "the way back alone"),
        ("2bit", "compression must be a dict"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(options)


def test_a_threshold_of_one_worker_in_the_sum_of_several() -> None:
    assert parse({"type": "2bit", "threshold": 0.5}).of_sum(3) == parse({"type": "2bit", "threshold": 1.5})
    assert parse({"type": "threshold", "threshold": 2.0**126}).of_sum(3).number("threshold") == 2.0**126
    for options in ({"type": "1bit", "threshold": 0.5}, {"type": "topk", "k": 3}, {"type": "fp16"}):
        assert parse(options).of_sum(3) == parse(options)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_it_arrives_as_it_was(compression: Compression) -> None:
    assert described(travelling(compression)) == compression
    assert described(travelling(replace(compression, pull=parse({"type": "fp16"})))) == compression, "one way each"


def test_none_is_none() -> None:
    assert travelling(None) is None
    assert described(None) is None


def test_what_is_none_is_refused() -> None:
    with pytest.raises(UnknownName, match="3bit"):
        described(["3bit", []])
    with pytest.raises(UsageError, match="threshold"):
        described(["2bit", [["threshold", -1.0]]])
