"""The receiver: payloads of any length; those of strangers are refused, with the target as it was, or are harmless."""

from __future__ import annotations

import contextlib

import pytest
import torch
from coded import COMPRESSIONS, NAMES, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.codecs import Compression, Compressor, add, assign, decode, parse
from kvstore.codecs.described import check_payloads
from kvstore.errors import WireError
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
