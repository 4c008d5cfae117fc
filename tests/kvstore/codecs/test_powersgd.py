"""Factors of low rank."""

from __future__ import annotations

import pytest
import torch
from coded import in_parts, whole

from kvstore.codecs import Compressor, parse


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(60, 2, generator=generator) @ torch.randn(2, 80, generator=generator)
    compression = parse({"type": "powersgd", "rank": 2})
    encoded = Compressor(compression).encode("w", matrix)
    assert encoded.nbytes == 12 + 4 * 2 * (60 + 80)
    assert torch.allclose(whole(compression, encoded).view(60, 80), matrix, atol=1e-4)


def test_the_basis_warms_up() -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(0, -3, 60)
    matrix = (
        torch.linalg.qr(torch.randn(60, 60, generator=generator)).Q * scale @ torch.randn(60, 80, generator=generator)
    )
    compression = parse({"type": "powersgd", "rank": 4})
    left, values, right = torch.linalg.svd(matrix)
    best = float((matrix - left[:, :4] * values[:4] @ right[:4]).norm())
    compressor, errors = Compressor(compression), []
    for _ in range(16):
        tensors, plain = compressor.state()
        if "basis.0" in tensors:  # without the error of the rounds before, to see the iteration alone
            compressor.load_state({**tensors, "residual.0": torch.zeros(4800)}, plain)
        errors.append(float((whole(compression, compressor.encode("w", matrix)).view(60, 80) - matrix).norm()))
    assert errors[-1] < errors[0]
    assert errors[-1] <= 1.01 * best


@pytest.mark.parametrize("shape", [(), (0,), (100,), (3, 3), (0, 5), (5, 0), (10, 4)])
def test_what_is_no_matrix_worth_it_goes_whole(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    compression = parse({"type": "powersgd", "rank": 2})
    encoded = Compressor(compression).encode("w", values)
    assert encoded.nbytes == 4 * values.numel()
    assert torch.equal(whole(compression, encoded), values.reshape(-1))


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-20, 1e20, 1e36])
def test_factors_of_any_magnitude(magnitude: float) -> None:
    compressor = Compressor(parse({"type": "powersgd", "rank": 2}))
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(60, 2, generator=generator) @ torch.randn(2, 80, generator=generator)
    for scale in (magnitude, 1.0, magnitude, 1.0):
        sent = whole(compressor.compression, compressor.encode("w", matrix * scale))
        assert bool(torch.isfinite(sent).all())
    compressor.drop("w")
    compressor.encode("w", matrix * magnitude)
    for _ in range(3):
        sent = whole(compressor.compression, compressor.encode("w", matrix))
    if magnitude <= 1:
        assert torch.allclose(sent.view(60, 80), matrix, atol=1e-3)


def test_what_factors_cannot_hold_goes_whole() -> None:
    compression = parse({"type": "powersgd", "rank": 2})
    compressor, matrix = Compressor(compression), torch.full((60, 80), 3e38)
    encoded = compressor.encode("w", matrix)
    assert torch.equal(in_parts(compression, encoded, [100, 1001]).view(60, 80), matrix)
    assert compressor.state()[0].keys() == {"residual.0"}
    assert encoded.nbytes == 4 * 4800
