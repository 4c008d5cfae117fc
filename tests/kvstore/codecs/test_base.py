"""Payloads of ranges: a key divided over any number of servers, anywhere, arrives as if there were one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
import torch
from coded import COMPRESSIONS, NAMES, arrays, in_parts, same_bits, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compression, Compressor, add, check_payload, codec, parse
from kvstore.codecs.codec import Memo, Noise, extremes, native, scratch
from kvstore.errors import UsageError
from kvstore.placement import split


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("sizes", [[1000], [0, 7, 8, 1, 984], [500, 0, 500, 0], [65536, 1, 65537]], ids=str)
def test_a_payload_is_spread_over_arrays(compression: Compression, sizes: Sequence[int]) -> None:
    count = sum(sizes)
    encoded = Compressor(compression).encode("w", torch.randn(count + 3, generator=torch.Generator().manual_seed(5)))
    way = check_payload(compression, encoded.payload(3, count + 3), count)
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
        add(compression, encoded.payload(start, stop), target[start:stop])
    assert same_bits(target, expected + 1)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_payloads_lie_anywhere_in_a_message(compression: Compression) -> None:
    encoded = Compressor(compression).encode("w", torch.randn(40, 40, generator=torch.Generator().manual_seed(2)))
    payload = encoded.payload(7, 1500)
    for shift in range(1, 9):
        message = torch.zeros(payload.numel() + shift, dtype=torch.uint8)
        message[shift:] = payload
        here, there = torch.zeros(1493), torch.zeros(1493)
        add(compression, payload, here)
        add(compression, message[shift:], there)
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
