"""What numpy works on, and the same without it."""

from __future__ import annotations

import pytest
import torch
from coded import COMPRESSIONS, NAMES, whole

from kvstore.codecs import Compression, Compressor, base
from kvstore.codecs.base import extremes, native


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_values_where_numpy_cannot_work(compression: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices do, done on the CPU: the same, but for random numbers and which of equals is chosen."""
    values = [torch.randn(200, 401, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    here, there = Compressor(compression), Compressor(compression)
    expected = [here.encode("w", each) for each in values]
    with monkeypatch.context() as patched:
        patched.setattr(base, "on_host", lambda tensor: False)
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
    monkeypatch.setattr(base, "on_host", lambda tensor: False)
    assert extremes(values) == (-3.0, 2.0)


def test_on_the_cpu_numpy_works_on_the_same_memory() -> None:
    values = torch.zeros(3)
    native(values)[1] = 5
    assert values.tolist() == [0, 5, 0]
    there = torch.empty(3, device="meta")
    assert not base.on_host(there)
    assert native(there) is there
