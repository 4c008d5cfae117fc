"""Payloads of ranges: a key divided over any number of servers, anywhere, arrives as if there were one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from coded import COMPRESSIONS, NAMES, arrays, in_parts, same_bits, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compression, Compressor, add, check_payload, parse
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
