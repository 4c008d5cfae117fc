"""Which elements are sent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from coded import arrays, in_parts, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compressor, parse
from kvstore.codecs import selection as choosing


@given(arrays(), st.floats(0.001, 1.0))
def test_the_largest_are_the_largest(values: torch.Tensor, ratio: float) -> None:
    if not values.numel():
        return
    k = choosing.count_to_send(values.numel(), ratio, None)
    found = choosing.largest(values, k).numpy()
    order = np.lexsort((np.arange(values.numel()), -values.abs().numpy()))
    expected = np.sort(order[:k])
    assert found.tolist() == expected[values.numpy()[expected] != 0].tolist()


def test_parts_are_rounded_up_and_at_least_one() -> None:
    assert [choosing.count_to_send(n, 0.01, None) for n in (1, 99, 100, 101, 700, 10**6)] == [1, 1, 1, 2, 7, 10**4]
    assert [choosing.count_to_send(n, None, 5) for n in (1, 5, 6)] == [1, 5, 5]


def test_random_elements_are_one_of_each_range_the_same_for_every_worker() -> None:
    compression = parse({"type": "randomk", "k": 10, "seed": 4})
    values = torch.ones(105)
    one, other = Compressor(compression), Compressor(compression)
    ranges = [(105 * n // 10, 105 * (n + 1) // 10) for n in range(10)]
    seen = torch.zeros(105)
    for _ in range(200):
        sent = whole(compression, one.encode("w", values))
        assert torch.equal(sent, whole(compression, other.encode("w", values)))
        places = sent.nonzero().view(-1).tolist()
        assert all(start <= place < stop for place, (start, stop) in zip(places, ranges, strict=True))
        seen += sent != 0
    assert bool((seen > 0).all())
    different = Compressor(parse({"type": "randomk", "k": 10, "seed": 5}))
    assert not torch.equal(
        whole(compression, different.encode("w", values)),
        whole(compression, Compressor(compression).encode("w", values)),
    )


def test_warm_up_sends_a_quarter_and_then_less() -> None:
    compressor = Compressor(parse({"type": "topk", "ratio": 0.01, "warmup_steps": 4}))
    generator = torch.Generator().manual_seed(1)
    sent = [compressor.encode("w", torch.randn(10000, generator=generator)).nbytes // 8 for _ in range(6)]
    assert sent[0] == 2500
    assert sent[4:] == [100, 100]
    for before, after in itertools.pairwise(sent[:5]):
        assert before / after == pytest.approx(25**0.25, rel=0.02)


def test_momentum_is_corrected_and_masked_as_in_deep_gradient_compression() -> None:
    momentum, k = 0.9, 5
    compression = parse({"type": "topk", "k": k, "momentum": momentum})
    compressor, rng = Compressor(compression), np.random.default_rng(1)
    u, v = np.zeros(50, dtype=np.float32), np.zeros(50, dtype=np.float32)
    for _ in range(20):
        grad = rng.standard_normal(50).astype(np.float32)
        u = np.float32(momentum) * u + grad
        v = v + u
        mask = np.zeros(50, dtype=bool)
        mask[np.argsort(-np.abs(v))[:k]] = True
        sent = whole(compression, compressor.encode("w", torch.from_numpy(grad))).numpy()
        np.testing.assert_allclose(sent, v * mask, rtol=1e-5, atol=1e-5)
        u[mask] = 0
        v[mask] = 0


def test_a_segment_of_which_half_is_sent_costs_no_more_than_all_of_it() -> None:
    values = torch.zeros(1000)
    values[:300] = 1.0
    compression = parse({"type": "threshold", "threshold": 0.5})
    encoded = Compressor(compression).encode("w", values)
    assert [encoded.payload(0, 600).numel(), encoded.payload(0, 601).numel()] == [2400, 2400]
    assert [encoded.payload(0, 602).numel(), encoded.payload(300, 1000).numel()] == [2400, 0]
    assert torch.equal(in_parts(compression, encoded, [100, 299, 600, 601]), values)


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
