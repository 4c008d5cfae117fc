"""Codecs: payloads of planes, and which elements are sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from coded import arrays, in_parts, whole, write
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import Compressor, decode, parse, quantization
from kvstore.codecs import selection as choosing
from kvstore.codecs.codec import Memo, Noise
from kvstore.codecs.quantization import Plane, PlaneCodec
from kvstore.errors import WireError
from kvstore.placement import split

# ---- payloads of planes, by a codec of this test: blocks of four elements that share a sum, which is easy to check


SIZE = 10


class Blocks(PlaneCodec):
    """Each element as int16; each block's number of elements as int32, for ``check_planes`` to look at."""

    planes = (Plane(torch.int32, 4), Plane(torch.int16, 1))

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> None:
        sizes, codes = planes
        sizes.copy_(torch.tensor([min(4, values.numel() - start) for start in range(0, values.numel(), 4)]))
        codes.copy_(values)

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(planes[1][: out.numel()])

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        if bool((planes[0] > 4).any()):
            raise WireError("a block of more than 4")


def encoded(values: torch.Tensor):  # type: ignore[no-untyped-def]
    made = Blocks().begin(values.shape, values.device, Memo("w", torch.zeros(values.numel())))
    made.put(0, values)
    made.finish()
    return made


VALUES = torch.arange(SIZE, dtype=torch.float32)


def test_a_plane_has_an_item_for_each_block_that_has_begun() -> None:
    plane = Plane(torch.int32, 4)
    assert [plane.items(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("start", range(SIZE))
@pytest.mark.parametrize("length", [1, 2, 5, SIZE])
def test_any_range_is_decoded_added_and_spread(start: int, length: int) -> None:
    stop = min(SIZE, start + length)
    checked = Blocks().check(encoded(VALUES).payload(start, stop), stop - start)
    out = torch.full((stop - start,), 100.0)
    checked.write(out, True)
    assert out.tolist() == [100.0 + number for number in range(start, stop)]
    checked.write(out, False)
    assert torch.equal(out, VALUES[start:stop])
    targets = [torch.empty(size) for size in (min(1, stop - start), max(0, stop - start - 1))]
    checked.spread(targets)
    assert torch.equal(torch.cat(targets), VALUES[start:stop])


def test_a_payload_is_the_items_of_its_blocks_and_where_it_begins() -> None:
    made = encoded(VALUES)
    assert made.payload(0, SIZE).numel() == 3 * 4 + SIZE * 2 + 1
    assert made.payload(5, 7).numel() == 4 + 3 * 2 + 1, "one block, from its first element on"
    assert int(made.payload(5, 7)[-1]) == 1


@pytest.mark.parametrize(
    ("change", "words"), [({-1: 4}, "4 elements into a block of 4"), ({-1: 1}, "a payload of"), ({0: 5}, "more than 4")]
)
def test_what_does_not_fit_is_refused(change: dict[int, int], words: str) -> None:
    payload = encoded(VALUES).payload(0, 8).clone()
    for place, value in change.items():
        payload[place] = value
    with pytest.raises(WireError, match=words):
        Blocks().check(payload, 8)


@given(arrays(special=False))
@pytest.mark.parametrize(("name", "bits", "least"), [("fp16", 11, 2.0**-25), ("bf16", 8, 2.0**-134)])
def test_halves_round_to_nearest(name: str, bits: int, least: float, values: torch.Tensor) -> None:
    values.clamp_(-65504, 65504)
    compression = parse({"type": name})
    arrived = whole(compression, Compressor(compression).encode("w", values))
    error = (arrived.double() - values.double()).abs()
    assert bool((error <= (values.double().abs() * 2.0**-bits).clamp(min=least)).all())


@pytest.mark.parametrize(("name", "top"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_overflow_is_clipped_and_sent_later(name: str, top: float) -> None:
    compression = parse({"type": name})
    compressor = Compressor(compression)
    values = torch.zeros(100)
    values[3], values[4], values[5] = 1.5 * min(top, 2e38), -1.5 * min(top, 2e38), top
    if name == "bf16":
        values[3], values[4] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    there = whole(compression, compressor.encode("w", values))
    assert there[3:6].tolist() == [top, -top, top]
    again = whole(compression, compressor.encode("w", torch.zeros(100)))
    assert torch.equal(again[3:5], (values[3:5] - there[3:5]).to(torch.float16 if name == "fp16" else torch.bfloat16))


BLOCK = 256


def largest_of_blocks(values: torch.Tensor) -> torch.Tensor:
    """For every element the largest magnitude of its block."""
    magnitudes = values.abs().numpy()
    most = [magnitudes[i : i + BLOCK].max() for i in range(0, len(magnitudes), BLOCK)]
    return torch.from_numpy(np.repeat(np.array(most, dtype=np.float64), BLOCK)[: len(magnitudes)])


@given(arrays())
def test_int8_is_within_half_a_scale_and_stochastic_within_one(values: torch.Tensor) -> None:
    for stochastic, share in ((False, 0.5), (True, 1.0)):
        compression = parse({"type": "int8", "stochastic": stochastic})
        arrived = whole(compression, Compressor(compression).encode("w", values))
        scale = largest_of_blocks(values) / 127
        error = (arrived.double() - values.double()).abs()
        assert bool((error <= scale * share * (1 + 1e-5) + 2e-43).all())


def test_stochastic_rounding_is_right_on_average() -> None:
    compression = parse({"type": "int8", "stochastic": True})
    values = torch.linspace(-1, 1, 250)
    rounds = 400
    total = torch.zeros(250)
    for key in range(rounds):  # each key is new: nothing is kept
        total += whole(compression, Compressor(compression).encode(key, values))
    assert float((total / rounds - values).abs().max()) < 4 * (1 / 127) * 0.5 / math.sqrt(rounds)


def test_what_decodes_is_finite_where_scales_are_large() -> None:
    compression = parse({"type": "int8"})
    values = torch.full((300,), torch.finfo(torch.float32).max)
    there = decode(compression, Compressor(compression).encode("w", values).payload(0, 300), 300)
    assert bool(torch.isfinite(there).all())
    assert float((there / values).min()) > 0.95


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
                write(self.compression, encoded.payload(start, stop), total[start:stop], add=True)
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


# ---- which elements are sent


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
    encodings = [compressor.encode("w", torch.randn(10000, generator=generator)) for _ in range(6)]
    sent = [encoded.payload(0, 10000).numel() // 8 for encoded in encodings]
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
    assert encoded.payload(0, encoded.size).numel() == 12 + 4 * 2 * (60 + 80)
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
    assert encoded.payload(0, encoded.size).numel() == 4 * values.numel()
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
    assert encoded.payload(0, encoded.size).numel() == 4 * 4800
