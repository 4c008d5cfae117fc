"""What is kept can be saved and goes on as if nothing had been; over many rounds nothing is lost."""

from __future__ import annotations

import msgpack
import pytest
import safetensors.torch
import torch
from coded import COMPRESSIONS, NAMES, same_bits, whole

from kvstore.codecs import Compression, Compressor, parse
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
    for given, said in wrong:
        with pytest.raises(UsageError):
            compressor.load_state(given, {**plain, "steps": said})
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
