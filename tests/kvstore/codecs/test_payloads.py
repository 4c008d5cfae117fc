"""Payloads of any length and of any ranges; those of strangers are refused, or are harmless."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from coded import COMPRESSIONS, NAMES, arrays, in_parts, same_bits, whole, write
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.codecs import CLOSE, Compression, Compressor, codec, decode, names, parse
from kvstore.codecs.codec import Memo, Noise, extremes, native, scratch
from kvstore.codecs.described import check_payloads
from kvstore.codecs.described import codec as codec_of
from kvstore.codecs.options import described, travelling
from kvstore.errors import UnknownName, UsageError, WireError
from kvstore.placement import split
from kvstore.values import to_buffer

# ---- payloads of ranges: a key divided over any number of servers, anywhere, arrives as if there were one


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("sizes", [[1000], [0, 7, 8, 1, 984], [500, 0, 500, 0], [65536, 1, 65537]], ids=str)
def test_a_payload_is_spread_over_arrays(compression: Compression, sizes: Sequence[int]) -> None:
    count = sum(sizes)
    encoded = Compressor(compression).encode("w", torch.randn(count + 3, generator=torch.Generator().manual_seed(5)))
    way = codec_of(compression).check(encoded.payload(3, count + 3), count)
    expected = torch.empty(count)
    way.write(expected, False)
    targets = [torch.full((size,), 7.0) for size in sizes]
    way.spread(targets)
    assert same_bits(torch.cat(targets), expected)


@given(arrays(), st.sampled_from(COMPRESSIONS), st.data())
def test_any_cuts_give_the_same_as_none(values: torch.Tensor, compression: Compression, data: st.DataObject) -> None:
    encoded = Compressor(compression).encode("w", values)
    cuts = data.draw(st.lists(st.integers(0, encoded.size), max_size=5))
    assert same_bits(in_parts(compression, encoded, cuts), whole(compression, encoded))


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("shape", [(40, 37), (300, 401), (1, 500), (500, 1), (3, 70000), (5, 6, 7)])
def test_matrices_are_cut_within_rows(compression: Compression, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    compressor = Compressor(compression)
    for _ in range(2):
        encoded = compressor.encode("w", values)
        expected = whole(compression, encoded)
        for servers in (2, 3, 7):
            cuts = [stop for _, stop in split(encoded.size, servers)]
            assert same_bits(in_parts(compression, encoded, cuts), expected)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_every_single_cut_of_a_small_key(compression: Compression) -> None:
    values = torch.randn(19, 31, generator=torch.Generator().manual_seed(2))
    encoded = Compressor(compression).encode("w", values)
    expected = whole(compression, encoded)
    for cut in range(0, encoded.size + 1, 5):
        assert same_bits(in_parts(compression, encoded, [cut]), expected)
    edges = range(0, encoded.size, 13)
    target = torch.ones(encoded.size)
    for start, stop in itertools.pairwise([*edges, encoded.size]):
        write(compression, encoded.payload(start, stop), target[start:stop], add=True)
    assert same_bits(target, expected + 1)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_payloads_lie_anywhere_in_a_message(compression: Compression) -> None:
    encoded = Compressor(compression).encode("w", torch.randn(40, 40, generator=torch.Generator().manual_seed(2)))
    payload = encoded.payload(7, 1500)
    for shift in range(1, 9):
        message = torch.zeros(payload.numel() + shift, dtype=torch.uint8)
        message[shift:] = payload
        here, there = torch.zeros(1493), torch.zeros(1493)
        write(compression, payload, here, add=True)
        write(compression, message[shift:], there, add=True)
        assert same_bits(here, there)


def test_cuts_outside_are_refused() -> None:
    encoded = Compressor(parse({"type": "1bit"})).encode("w", torch.ones(10))
    for start, stop in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(UsageError, match="of 10"):
            encoded.payload(start, stop)


def drawn(memo: Memo, seed: int = 0) -> list[float]:
    return memo.noise(seed).uniform(4).tolist()


def test_random_numbers_follow_from_seed_key_and_step() -> None:
    memo, other = Memo("w", torch.zeros(2)), Memo("w", torch.ones(3))
    assert drawn(memo) == drawn(other), "of what is kept they do not depend"
    other.step += 1
    different = [
        drawn(memo),
        drawn(other),
        drawn(memo, seed=1),
        drawn(Memo("v", torch.zeros(2))),
        drawn(Memo(1, torch.zeros(2))),
    ]
    assert len({tuple(numbers) for numbers in different}) == 5


@pytest.mark.parametrize("kept", [{}, {"velocity": torch.ones(2)}, {"basis": torch.ones(1, 2)}])
def test_all_that_is_kept_is_moved(kept: dict[str, torch.Tensor]) -> None:
    memo = Memo("w", torch.zeros(2), **kept)  # type: ignore[arg-type]
    memo.to(torch.device("meta"))
    assert memo.residual.is_meta
    assert {name for name in ("velocity", "basis") if getattr(memo, name) is not None} == kept.keys()
    assert all(getattr(memo, name).is_meta for name in kept)


LIKE = torch.zeros(100)


def test_the_same_name_gets_the_same_memory_and_another_name_other_memory() -> None:
    one = scratch("test one", LIKE)
    assert one.shape == (100,)
    assert scratch("test one", LIKE, 50).data_ptr() == one.data_ptr()
    assert scratch("test one", LIKE, 50).shape == (50,)
    assert scratch("test other", LIKE).data_ptr() != one.data_ptr()


def test_what_has_grown_stays_so() -> None:
    scratch("test grows", LIKE)
    grown = scratch("test grows", LIKE, 1000)
    assert grown.shape == (1000,)
    assert scratch("test grows", LIKE).data_ptr() == grown.data_ptr()


def test_each_thread_has_its_own() -> None:
    mine, theirs = scratch("test threads", LIKE), []
    thread = threading.Thread(target=lambda: theirs.append(scratch("test threads", LIKE)))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() != mine.data_ptr()


def test_large_buffers_are_not_kept() -> None:
    size = 1 << 20
    one = scratch("test large", LIKE, size)
    assert one.shape == (size,)
    assert scratch("test large", LIKE, size).data_ptr() != one.data_ptr()


def filled(size: int, step: int = 0) -> torch.Tensor:
    out = torch.full((size,), 9.0)
    Noise(1, "w", step).fill(out)
    return out


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_any_number_is_filled_the_same_each_time(size: int) -> None:
    assert torch.equal(filled(size), filled(size))
    assert bool(((filled(size) >= 0) & (filled(size) < 1)).all())


def test_they_are_uniform() -> None:
    values = filled(100_000)
    counts = torch.histc(values, 10, 0.0, 1.0)
    assert bool((counts - 10_000).abs().max() < 500)
    assert not torch.equal(values, filled(100_000, step=1))


def test_other_devices_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = filled(1000)
    monkeypatch.setattr(codec, "on_host", lambda tensor: False)
    there = filled(1000)
    assert torch.equal(there, filled(1000))
    assert not torch.equal(here, there)
    assert bool(((there >= 0) & (there < 1)).all())


def test_normal_and_uniform_numbers_have_the_shape_that_was_asked_for() -> None:
    normal, uniform = Noise(1, "w", 0).normal(3, 1000), Noise(1, "w", 0).uniform(5)
    assert (normal.shape, normal.dtype) == ((3, 1000), torch.float32)
    assert abs(float(normal.mean())) < 0.1
    assert abs(float(normal.std()) - 1) < 0.1
    assert (uniform.shape, uniform.dtype) == ((5,), torch.float64)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_values_where_numpy_cannot_work(compression: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices do, done on the CPU: the same, but for random numbers and which of equals is chosen."""
    values = [torch.randn(200, 401, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    here, there = Compressor(compression), Compressor(compression)
    expected = [here.encode("w", each) for each in values]
    with monkeypatch.context() as patched:
        patched.setattr(codec, "on_host", lambda tensor: False)
        encoded = [there.encode("w", each) for each in values]
        decoded = [whole(compression, each) for each in encoded]
    for one, other, arrived in zip(expected, encoded, decoded, strict=True):
        assert torch.equal(arrived, whole(compression, other))
        if compression.number("stochastic"):
            assert torch.allclose(arrived, whole(compression, one), atol=0.1)
            assert float((arrived - whole(compression, one)).mean().abs()) < 1e-3
        else:
            assert torch.equal(one.payload(0, one.size), other.payload(0, other.size))


def test_extremes_are_found_with_numpy_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([0.5, -3.0, 2.0])
    assert extremes(values) == (-3.0, 2.0)
    monkeypatch.setattr(codec, "on_host", lambda tensor: False)
    assert extremes(values) == (-3.0, 2.0)


def test_on_the_cpu_numpy_works_on_the_same_memory() -> None:
    values = torch.zeros(3)
    native(values)[1] = 5
    assert values.tolist() == [0, 5, 0]
    there = torch.empty(3, device="meta")
    assert not codec.on_host(there)
    assert native(there) is there


# ---- the receiver: payloads of any length; those of strangers are refused, with the target as it was, or are harmless


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 31, 33, 257])
def test_any_length_goes(compression: Compression, size: int) -> None:
    values = torch.arange(size, dtype=torch.float32) - size / 3
    encoded = Compressor(compression).encode("w", values)
    payload = encoded.payload(0, size)
    assert payload.dtype == torch.uint8
    out = torch.full((size,), 2.0)
    write(compression, payload, out, add=True)
    assert torch.equal(out, decode(compression, payload, size) + 2.0)
    write(compression, payload, out, add=False)
    assert same_bits(out, decode(compression, payload, size))
    assert encoded.payload(size, size).numel() == 0
    assert decode(compression, encoded.payload(size // 2, size // 2), 0).shape == (0,)


I32, F32, U8, I8 = torch.int32, torch.float32, torch.uint8, torch.int8


def payload_of(*parts: tuple[list[float], torch.dtype]) -> torch.Tensor:
    return torch.cat([torch.tensor(values, dtype=dtype).view(torch.uint8) for values, dtype in parts])


def try_both(compression: Compression, payload: torch.Tensor, count: int) -> None:
    for add in (False, True):
        target = torch.full((count,), 3.0)
        try:
            write(compression, payload, target, add=add)
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
