"""Arrays that are encoded as one: the same bits as one by one, and the same is kept of each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from coded import COMPRESSIONS, NAMES, arrays, same_bits, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compression, Compressor, check_payload, parse
from kvstore.errors import Mismatch, UsageError

JOINING = [compression for compression in COMPRESSIONS if Compressor(compression).joins]


def joined(compressor: Compressor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """What arrives of ``values`` encoded as one."""
    sizes = [value.numel() for value in values.values()]
    encoded = compressor.encode_joined(list(values), sizes, torch.cat(list(values.values())))
    return whole(compressor.compression, encoded)


def singly(compressor: Compressor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([whole(compressor.compression, compressor.encode(key, value)) for key, value in values.items()])


def test_which_do() -> None:
    kinds = {compression.type for compression in JOINING}
    assert kinds == {"fp16", "bf16", "1bit", "2bit"}


@given(st.sampled_from(JOINING), st.lists(arrays(), min_size=1, max_size=4), st.lists(st.booleans(), max_size=4))
def test_joined_or_one_by_one(compression: Compression, values: list[torch.Tensor], how: list[bool]) -> None:
    here, there = Compressor(compression), Compressor(compression)
    named = {f"k{number}": value for number, value in enumerate(values)}
    for together in [True, *how]:
        arrived = (joined if together else singly)(here, named)
        assert same_bits(arrived, singly(there, named))
    mine, its = here.state(), there.state()
    assert mine[1] == its[1]
    assert all(same_bits(tensor, its[0][name]) for name, tensor in mine[0].items())
    assert here.statistics().arrays == there.statistics().arrays
    assert here.statistics().bytes_in == there.statistics().bytes_in


def test_in_other_company_every_time() -> None:
    compression = parse({"type": "2bit", "threshold": 0.5})
    here, there = Compressor(compression), Compressor(compression)
    values = {key: torch.randn(9, generator=torch.Generator().manual_seed(n)) for n, key in enumerate("abcd")}
    for keys in ("ab", "cd", "abcd", "bd", "ab", "dcba", "a", "abcd"):
        some = {key: values[key] for key in keys}
        assert same_bits(joined(here, some), singly(there, some))


def test_what_is_kept_can_be_saved_loaded_and_dropped() -> None:
    compression = parse({"type": "1bit"})
    here, there = Compressor(compression), Compressor(compression)
    values = {"a": torch.tensor([0.25, -3.0]), "b": torch.tensor([2.0])}
    joined(here, values)
    there.load_state(*here.state())
    assert same_bits(joined(here, values), joined(there, values))
    here.drop("a")
    there.load_state(*here.state())
    assert same_bits(joined(here, values), joined(there, values))


def test_what_is_not_finite_is_named_and_nothing_is_kept_of_it() -> None:
    compressor = Compressor(parse({"type": "fp16"}))
    fine, bad = torch.ones(3), torch.tensor([1.0, float("nan")])
    joined(compressor, {"a": fine, "b": fine})
    with pytest.raises(UsageError, match="key 'b' has infinite"):
        joined(compressor, {"a": fine, "b": torch.tensor([1.0, float("inf"), 0.0])})
    assert not compressor.state()[0]
    with pytest.raises(UsageError, match="key 'c'"):
        joined(compressor, {"c": bad, "a": fine})
    assert joined(compressor, {"a": fine, "c": fine}).tolist() == [1.0] * 6


def test_a_key_of_another_size_is_refused() -> None:
    compressor = Compressor(parse({"type": "fp16"}))
    joined(compressor, {"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(Mismatch, match="key 'b' has 4 elements, and had 2"):
        joined(compressor, {"a": torch.ones(3), "b": torch.ones(4)})


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
