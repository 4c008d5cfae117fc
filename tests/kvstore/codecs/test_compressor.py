"""The sender: what arrives and the residual are what was given, arrays encoded as one, and its state."""

from __future__ import annotations

import math

import msgpack
import pytest
import safetensors.torch
import torch
from coded import COMPRESSIONS, NAMES, arrays, in_parts, same_bits, whole
from hypothesis import given
from hypothesis import strategies as st
from interrupting import interrupted

from kvstore.codecs import Compression, Compressor, Encoded, ResumableEncodings, parse
from kvstore.errors import Mismatch, UsageError
from kvstore.spec import Key


def gradients(rounds: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).clamp_(-0.9, 0.9) for _ in range(rounds)]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_a_restored_compressor_goes_on_bit_for_bit(compression: Compression) -> None:
    one, other = Compressor(compression), Compressor(compression)
    other.encode("forgotten", torch.ones(4))
    for grad in gradients(3, 50, 60):
        one.encode("w", grad)
        one.encode(7, grad[0])
    one.encode("empty", torch.zeros(0))
    tensors, plain = one.state()
    tensors = safetensors.torch.load(safetensors.torch.save(tensors))
    other.load_state(tensors, msgpack.unpackb(msgpack.packb(plain)))
    for grad in gradients(3, 50, 60):
        for key, values in (("w", grad), (7, grad[0]), ("new", grad), ("empty", torch.zeros(0))):
            here, there = one.encode(key, values), other.encode(key, values)
            assert torch.equal(here.payload(0, here.size), there.payload(0, there.size))
    assert one.state()[1] == other.state()[1]
    for name, tensor in one.state()[0].items():
        assert same_bits(tensor.reshape(-1), other.state()[0][name].reshape(-1))


def test_a_state_does_not_change_with_its_compressor() -> None:
    compressor = Compressor(parse({"type": "topk", "momentum": 0.5}))
    compressor.encode("w", torch.ones(500))
    tensors, plain = compressor.state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    again = Compressor(compressor.compression)
    again.load_state(tensors, plain)
    for user in (compressor, again):
        user.encode("w", torch.ones(500))
    assert all(same_bits(tensor, before[name]) for name, tensor in tensors.items())
    assert plain["steps"] == [["w", 1]]


def test_states_of_others_are_refused() -> None:
    compression = parse({"type": "topk", "momentum": 0.5})
    compressor = Compressor(compression)
    compressor.encode("w", torch.ones(5))
    tensors, plain = compressor.state()
    with pytest.raises(Mismatch, match="2bit"):
        Compressor(parse({"type": "2bit"})).load_state(tensors, plain)
    steps = [["w", 1]]
    wrong: list[tuple[dict[str, torch.Tensor], object]] = [
        ({}, steps),
        ({**tensors, "residual.1": torch.ones(3)}, steps),
        ({**tensors, "residual.0": torch.ones(5, dtype=torch.float64)}, steps),
        ({**tensors, "residual.0": torch.ones(5, 1)}, steps),
        ({**tensors, "velocity.0": torch.ones(4)}, steps),
        ({"residual.0": torch.ones(5)}, steps),
        ({**tensors, "basis.0": torch.ones(2, 4)}, steps),
        ({**tensors, "residual.0": torch.full((5,), torch.nan)}, steps),
        (tensors, None),
        (tensors, [["w", -1]]),
        (tensors, [["w", 10**400]]),
        (tensors, [["w", True]]),
        (tensors, [["w"]]),
        (tensors, [[1.5, 1]]),
    ]
    for other, said in wrong:
        with pytest.raises(UsageError):
            compressor.load_state(other, {**plain, "steps": said})
    assert compressor.state()[1] == plain


@pytest.mark.parametrize("shapes", [{"w": (30, 39)}, {"w": (40, 30)}, {"v": (30, 40)}, {"w": ()}, {}])
def test_a_state_of_other_arrays_is_refused(shapes: dict[Key, tuple[int, ...]]) -> None:
    compressor, other = (Compressor(parse({"type": "powersgd", "rank": 2})) for _ in range(2))
    other.encode("w", torch.randn(30, 40))
    tensors, plain = other.state()
    with pytest.raises(UsageError, match="the state of key 'w' does not fit an array of shape"):
        compressor.load_state(tensors, plain, shapes)
    assert compressor.state()[0] == {}
    compressor.load_state(tensors, plain, {"w": (30, 40), "v": ()})
    assert compressor.state()[0].keys() == {"residual.0", "basis.0"}


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_over_many_rounds_all_arrives_but_what_is_kept(compression: Compression) -> None:
    compressor, rounds, momentum = Compressor(compression), 60, compression.number("momentum") or 0.0
    arrived, sent, velocity = (torch.zeros(400, dtype=torch.float64) for _ in range(3))
    for grad in gradients(rounds, 20, 20):
        grad *= 0.5  # within the threshold of 2bit, beyond which what is kept may grow
        came = whole(compression, compressor.encode("w", grad)).double()
        arrived += came
        velocity = momentum * velocity + grad.reshape(-1).double()
        sent += velocity
        velocity[came != 0] *= 0 if momentum else 1
    kept = compressor.state()[0]["residual.0"].double()
    assert float((arrived + kept - sent).abs().max()) < 1e-4
    bounds = {"fp16": 1e-3, "bf16": 1e-2, "2bit": 0.5, "1bit": 1.0, "int8": 0.03, "randomk": 25, "threshold": 1.0}
    assert float(kept.abs().max()) <= bounds.get(compression.type, 30)


def test_a_server_answers_in_the_same_way() -> None:
    """Both ways compressed, with errors kept at both ends: the worker's copy follows the true sum."""
    up, down = parse({"type": "topk", "ratio": 0.25}), parse({"type": "2bit", "threshold": 4.0})
    workers, server = [Compressor(up) for _ in range(3)], Compressor(down)
    true, copy = torch.zeros(320, dtype=torch.float64), torch.zeros(320, dtype=torch.float64)
    for grad in gradients(80, 320):
        total = torch.zeros(320)
        for rank, worker in enumerate(workers):
            total += whole(up, worker.encode("w", grad * (rank + 1) / 3))
            true += grad.double() * (rank + 1) / 3
        copy += whole(down, server.encode(17, total)).double()
    kept = sum(worker.state()[0]["residual.0"].double() for worker in workers)
    kept += server.state()[0]["residual.0"].double()
    assert float((copy + kept - true).abs().max()) < 1e-3
    assert float((copy - true).abs().max()) < 20


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


def residual(compressor: Compressor, i: int = 0) -> torch.Tensor:
    return compressor.state()[0][f"residual.{i}"]


@given(arrays(), arrays(), st.sampled_from(COMPRESSIONS))
def test_what_arrives_and_what_is_kept_are_what_was_there(
    first: torch.Tensor, second: torch.Tensor, compression: Compression
) -> None:
    # Exact for all that send elements as they are, or round them to nearest: the error is then a float32. Fixed steps,
    # as of 1bit and 2bit, and products of factors leave what float32 must round, by half a unit of its last place.
    exact = compression.type in ("fp16", "bf16", "topk", "threshold", "randomk") or (
        compression.type == "int8" and not compression.number("stochastic")
    )
    second = second[: first.numel()]
    first = first[: second.numel()]
    if compression.type == "fp16":
        first, second = first.clamp(-(2.0**28), 2.0**28), second.clamp(-(2.0**28), 2.0**28)
    compressor = Compressor(compression)
    for values in (first, second):
        kept = residual(compressor) if compressor.memos else torch.zeros_like(values)
        velocity = compressor.state()[0].get("velocity.0", torch.zeros_like(values))
        momentum = compression.number("momentum")
        came = velocity * momentum + values if momentum else values
        encoded = compressor.encode("w", values)
        given_in = (kept + came).double()
        arrived = whole(compression, encoded).double()
        now = residual(compressor).double()
        if exact:
            assert torch.equal(arrived + now, given_in)
        else:
            assert bool(((arrived + now - given_in).abs() <= now.abs() * 2.0**-24 + 2.0**-149).all())


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_taken_as_float32(compression: Compression, dtype: torch.dtype) -> None:
    values = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = values.clone()
    there = whole(compression, Compressor(compression).encode("w", values.requires_grad_()))
    assert same_bits(there, whole(compression, Compressor(compression).encode("w", before.float())))
    assert torch.equal(values, before)


def test_strides_do_not_matter() -> None:
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    compression = parse({"type": "fp16"})
    there = whole(compression, Compressor(compression).encode("w", values.T))
    assert torch.equal(there, values.T.reshape(-1).half().float())


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_what_was_kept_is_dropped(compression: Compression, bad: float) -> None:
    compressor, values = Compressor(compression), torch.ones(70000)
    compressor.encode("w", values)
    compressor.encode("v", values)
    values[66000] = bad
    with pytest.raises(UsageError, match="'w' has infinite or NaN"):
        compressor.encode("w", values)
    assert compressor.state()[1]["steps"] == [["v", 1]]


def test_a_sum_that_overflows_is_no_infinity() -> None:
    compression = parse({"type": "bf16"})
    values = torch.full((1000,), 2.0**127)
    assert torch.equal(whole(compression, Compressor(compression).encode("w", values)), values)


def test_integers_and_other_sizes_are_refused() -> None:
    compressor = Compressor(parse({"type": "2bit"}))
    with pytest.raises(UsageError, match=r"'w' is torch\.int64"):
        compressor.encode("w", torch.ones(3, dtype=torch.int64))
    compressor.encode("w", torch.ones(3))
    with pytest.raises(Mismatch, match="4 elements, and had 3"):
        compressor.encode("w", torch.ones(4))
    compressor.drop("w")
    compressor.encode("w", torch.ones(4))


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"type": "fp16"}, 2),
        ({"type": "bf16"}, 2),
        ({"type": "2bit"}, 16 / 1.01),
        ({"type": "1bit"}, 32 / 1.01),
        ({"type": "topk", "ratio": 0.01}, 45),
        ({"type": "randomk", "ratio": 0.01}, 45),
        ({"type": "int8"}, 3.9),
        ({"type": "powersgd", "rank": 4}, 60),
    ],
)
@pytest.mark.parametrize("size", [100_000, 400_000])
def test_payloads_are_as_small_as_promised(options: dict[str, object], least: float, size: int) -> None:
    values = torch.randn(size // 500, 500, generator=torch.Generator().manual_seed(1))
    encoded = Compressor(parse(options)).encode("w", values)
    least = min(least, size // (size // 500 + 500) / 4.01) if options["type"] == "powersgd" else least
    assert 4 * size / encoded.payload(0, size).numel() >= least


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_values_on_a_gpu(compression: Compression) -> None:
    generator = torch.Generator().manual_seed(1)
    here, there = Compressor(compression), Compressor(compression)
    for _ in range(4):
        values = torch.randn(200, 301, generator=generator)
        one, other = here.encode("w", values), there.encode("w", values.cuda())
        sent = whole(compression, other)
        assert other.payload(0, other.size).is_cpu
        assert torch.allclose(in_parts(compression, other, [1000, 33333]), sent)
        if compression.type not in ("powersgd",) and not compression.number("stochastic"):
            assert torch.allclose(whole(compression, one), sent)
        else:
            assert math.isclose(float(sent.norm()), float(whole(compression, one).norm()), rel_tol=0.1)
    values = torch.randn(200, 301, generator=generator)
    there.encode("w", values)  # and back on the CPU


def payload(encoded: Encoded) -> torch.Tensor:
    return encoded.payload(0, encoded.size)


def given(compressor: Compressor, encoded: Encoded) -> torch.Tensor:
    """What was to be sent, to six digits: what arrives and what is kept."""
    return (whole(compressor.compression, encoded) + compressor.state()[0]["residual.0"]).round(decimals=5)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=NAMES)
def test_after_an_interrupt_at_any_line_the_same_is_sent_and_kept(compression: Compression) -> None:
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(1))
    clean = Compressor(compression)
    clean.encode("w", values)
    expected, after, came = clean.encode("w", values), 0, True
    while came:
        compressor = Compressor(compression)
        compressor.encode("w", values)
        resumable: ResumableEncodings = {}
        came = interrupted(
            lambda compressor=compressor, resumable=resumable: compressor.encode("w", values, resumable), after
        )
        encoded = compressor.encode("w", values, resumable)
        if not compression.number("stochastic"):  # which may draw again
            assert torch.equal(payload(encoded), payload(expected)), after
        assert compressor.encode("w", values, resumable) is encoded, "it is complete, and not made again"
        assert torch.equal(given(compressor, encoded), given(clean, expected)), after
        for name, tensor in compressor.state()[0].items() if not compression.number("stochastic") else ():
            assert same_bits(tensor.reshape(-1), clean.state()[0][name].reshape(-1)), (after, name)
        after += 1
    assert after > 1


def test_another_call_has_encodings_of_its_own() -> None:
    compressor = Compressor(COMPRESSIONS[2])
    values = torch.full((8,), 0.3)
    first = compressor.encode("w", values, {})
    second = compressor.encode("w", values, {})
    assert not torch.equal(payload(first), payload(second)), "what the first lacked is in the second"
