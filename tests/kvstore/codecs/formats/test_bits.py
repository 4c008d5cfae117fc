"""1bit and 2bit: MXNet's own assertions, made of what workers encode and a server sums.

After tests/nightly/dist_sync_kvstore.py and test_kvstore.py of MXNet 2.0, whose Test optimizer adds a multiple.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coded import arrays, whole
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compressor, add, parse, quantization
from kvstore.placement import split


@given(arrays())
def test_bits_are_what_mxnet_says(values: torch.Tensor) -> None:
    two, one = parse({"type": "2bit", "threshold": 0.5}), parse({"type": "1bit", "threshold": 0.25})
    ups, downs = values >= 0.5, values <= -0.5
    assert torch.equal(whole(two, Compressor(two).encode("w", values)), 0.5 * (ups.float() - downs.float()))
    assert torch.equal(whole(one, Compressor(one).encode("w", values)), torch.where(values > 0.25, 1.0, -1.0))


@given(st.integers(0, 70), st.integers(0, 2**32))
def test_bits_are_packed_the_same_without_numpy(size: int, seed: int) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5
    here, there = torch.zeros(-(-size // 8), dtype=torch.uint8), torch.ones(-(-size // 8), dtype=torch.uint8)
    quantization.pack_bits(mask.numpy(), here)
    quantization.pack_bits_anywhere(mask, there)
    assert torch.equal(here, there)
    assert (quantization.unpack_bits(here, size) == mask.numpy()).all()
    assert torch.equal(quantization.unpack_bits_anywhere(here, size), mask.to(torch.int8))


RATE = 2.0


SHAPES = [(2, 3), (4, 4), (100, 100), (121, 121)]


class Job:
    """Workers that push, a value that is cut over two servers and is pulled uncompressed."""

    def __init__(self, options: dict[str, object], workers: int, shape: tuple[int, int]) -> None:
        self.compression = parse(options)
        self.workers = [Compressor(self.compression) for _ in range(workers)]
        self.shape = shape
        self.value = torch.zeros(shape).view(-1)

    def push(self, grads: list[torch.Tensor]) -> np.ndarray:
        """Push one gradient by worker; return what the value has become."""
        total = torch.zeros_like(self.value)
        for worker, grad in zip(self.workers, grads, strict=True):
            encoded = worker.encode("w", grad)
            for start, stop in split(encoded.size, 2):
                add(self.compression, encoded.payload(start, stop), total[start:stop])
        self.value += RATE * total
        return self.value.view(self.shape).numpy().copy()

    def push_all(self, number: float) -> np.ndarray:
        return self.push([torch.ones(self.shape) * number for _ in self.workers])


def quantize_2bit(values: np.ndarray, threshold: float) -> np.ndarray:
    return np.where(values >= threshold, threshold, np.where(values <= -threshold, -threshold, 0)).astype(np.float32)


def quantize_1bit(values: np.ndarray, threshold: float) -> np.ndarray:
    return np.where(values > threshold, 1, -1).astype(np.float32)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_2bit_residual_and_ones(workers: int, shape: tuple[int, int]) -> None:
    t = 0.5
    job = Job({"type": "2bit", "threshold": t}, workers, shape)
    assert (job.push_all(0) == 0).all()
    assert (job.push_all(0.4) == 0).all()
    expected = t * RATE * workers
    assert (job.push_all(t - 0.4) == expected).all()
    assert (job.push_all(0.2) == expected).all()
    expected += t * RATE * workers
    assert (job.push_all(t - 0.2) == expected).all()
    expected += t * RATE * workers
    assert (job.push_all(t) == expected).all()
    for _ in range(10):
        expected -= t * RATE * workers
        assert (job.push_all(-t) == expected).all()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_2bit_residual_of_the_device_store(workers: int, shape: tuple[int, int]) -> None:
    t = 0.5
    job = Job({"type": "2bit", "threshold": t}, workers, shape)
    assert (job.push_all(0.4) == 0).all()
    assert (job.push_all(t - 0.3) == t * RATE * workers).all()
    assert (job.push_all(0.2) == t * RATE * workers).all()
    assert (job.push_all(t - 0.3) == 2 * t * RATE * workers).all()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
def test_1bit_ones_and_residual(workers: int, shape: tuple[int, int], threshold: float) -> None:
    job = Job({"type": "1bit", "threshold": threshold}, workers, shape)
    step = RATE * workers
    for i in range(5):
        assert (job.push_all(1) == (i + 1) * step).all()
    for i in range(5):
        assert (job.push_all(-1) == (4 - i) * step).all()
    value = residual = 0.0
    for pushed in (2, 0, -2):
        sign = 1 if pushed + residual > threshold else -1
        value, residual = value + sign * step, pushed + residual - sign
        assert (job.push_all(pushed) == value).all()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("options", "quantize"),
    [
        ({"type": "2bit", "threshold": 0.5}, quantize_2bit),
        ({"type": "2bit", "threshold": 0.3}, quantize_2bit),
        ({"type": "1bit", "threshold": 0.0}, quantize_1bit),
        ({"type": "1bit", "threshold": 0.5}, quantize_1bit),
    ],
)
def test_random_values_equal_the_simulated_quantizer(
    workers: int, shape: tuple[int, int], options: dict[str, object], quantize: object
) -> None:
    job, rng = Job(options, workers, shape), np.random.default_rng(123)
    residuals = [np.zeros(shape, dtype=np.float32) for _ in range(workers)]
    value = np.zeros(shape, dtype=np.float32)
    for _ in range(7):
        grads = [rng.uniform(-0.6, 0.6, shape).astype(np.float32) for _ in range(workers)]
        total = np.zeros(shape, dtype=np.float32)
        for i, grad in enumerate(grads):
            sent = quantize(grad + residuals[i], np.float32(options["threshold"]))  # type: ignore[operator]
            residuals[i] = grad + residuals[i] - sent
            total += sent
        value += np.float32(RATE) * total
        assert (job.push([torch.from_numpy(grad) for grad in grads]) == value).all()
