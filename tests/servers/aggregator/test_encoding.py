"""Sums encoded at an aggregator: nothing is lost between what goes out and what is kept, and what is kept travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import floats, sender, sent
from coded import COMPRESSIONS, NAMES, arrays, same_bits
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.codecs import Compression, Compressor, parse
from kvstore.codecs.compressor import EncodedSum
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described, travelling
from kvstore.errors import UnknownName, UsageError, WireError
from kvstore.optim.states import SegmentState, pack_states, unpack_states
from kvstore.values import to_buffer
from servers.aggregator.encoding import Encoding

HERE = [compression for compression in COMPRESSIONS if compression.type != "powersgd"]  # needs whole matrices
IDS = [name for name in NAMES if not name.startswith("powersgd")]
SIZES = {1: 300, 4: 5, 9: 0, 12: 700}


def encoding(sizes: dict[int, int] = SIZES) -> Encoding:
    return Encoding(lambda number: f"key {number}", sizes.__getitem__)


def encode(
    at: Encoding, compression: Compression, values: torch.Tensor, sizes: dict[int, int] = SIZES, workers: int = 1
) -> EncodedSum:
    return at.encode(travelling(compression), list(sizes), list(sizes.values()), values, workers)


def arrived(encoded: EncodedSum, sizes: dict[int, int] = SIZES) -> torch.Tensor:
    """What a server makes of it."""
    codec, lengths, counts, buffers = encoded
    ids = list(sizes)
    message = wire.Push(sender(role="aggregator"), 0, ids, [1] * len(ids), False, None, None, codec, lengths, counts)
    message = sent(replace(message, buffers=buffers))
    compression = described(message.codec)
    assert compression is not None
    out = torch.empty(sum(sizes.values()))
    start = 0
    for size, payload in check_payloads(compression, message, list(sizes.values())):
        payload.write(out[start : start + size], False)
        start += size
    assert start == out.numel()
    return out


def states(at: Encoding, sizes: dict[int, int] = SIZES) -> wire.OptimizerStates:
    reply = sent(at.get_states(wire.GetStates(sender(), 0, list(sizes))))
    assert isinstance(reply, wire.OptimizerStates)
    return reply


def kept(at: Encoding, sizes: dict[int, int] = SIZES, name: str = "residual") -> torch.Tensor:
    """What has not been sent, of all segments."""
    values = {number: value for number, state, value in unpack_states(states(at, sizes)) if state == name}
    return torch.cat([values[number] for number in sizes])


def put(reply: wire.OptimizerStates, rank: int = 0) -> wire.PutStates:
    """The message that brings back what ``states`` returned."""
    columns = reply.ids, reply.names, reply.shapes, reply.dtypes, reply.buffers
    message = sent(wire.PutStates(sender(rank), 0, *columns))
    assert isinstance(message, wire.PutStates)
    return message


def rounds(number: int, sizes: dict[int, int] = SIZES) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(sum(sizes.values()), generator=made) for _ in range(number)]


@pytest.mark.parametrize("compression", HERE, ids=IDS)
def test_what_arrives_and_what_is_kept_are_all_that_was_given(compression: Compression) -> None:
    at, momentum = encoding(), compression.number("momentum") or 0.0
    came, given_so_far, velocity = (torch.zeros(sum(SIZES.values()), dtype=torch.float64) for _ in range(3))
    for values in rounds(20):
        decoded = arrived(encode(at, compression, values)).double()
        velocity = momentum * velocity + values.double()
        came += decoded
        given_so_far += velocity
        velocity[decoded != 0] *= 0 if momentum else 1
    assert float((came + kept(at).double() - given_so_far).abs().max()) < 1e-4


@given(st.sampled_from(HERE), st.lists(arrays(special=False), min_size=1, max_size=4), st.integers(1, 3))
def test_of_any_segments(compression: Compression, values: list[torch.Tensor], times: int) -> None:
    sizes = {3 * number + 1: value.numel() for number, value in enumerate(values)}
    given_values = torch.cat(values)
    at, twin = encoding(sizes), encoding(sizes)
    left, velocity = (torch.zeros_like(given_values, dtype=torch.float64) for _ in range(2))
    momentum = compression.number("momentum") or 0.0
    for _ in range(times):
        encoded = encode(at, compression, given_values, sizes)
        assert list(map(bytes, encoded.buffers)) == list(
            map(bytes, encode(twin, compression, given_values, sizes).buffers)
        )
        decoded = arrived(encoded, sizes).double()
        velocity = momentum * velocity + given_values.double()
        scale = (left.abs() + velocity.abs() + decoded.abs()).clamp(min=1e-30)
        now = kept(at, sizes).double()
        assert float(((decoded + now - left - velocity) / scale).abs().max() if now.numel() else 0.0) < 1e-6
        velocity[decoded != 0] *= 0 if momentum else 1
        left = now


@pytest.mark.parametrize("compression", HERE, ids=IDS)
def test_each_segment_is_encoded_as_a_worker_would_encode_an_array(compression: Compression) -> None:
    at, worker = encoding(), Compressor(compression)
    for values in rounds(3):
        parts = values.split(list(SIZES.values()))
        expected = []
        for number, part in zip(SIZES, parts, strict=True):
            encoded = worker.encode(number, part)
            message = EncodedSum(travelling(compression), [encoded.payload(0, encoded.size).numel()], [1], [])
            payload = to_buffer(encoded.payload(0, encoded.size))
            alone = message._replace(buffers=wire.pack_arrays([payload]))
            expected.append(arrived(alone, {number: SIZES[number]}))
        assert same_bits(arrived(encode(at, compression, values)), torch.cat(expected))


def test_segments_whose_elements_are_independent_share_a_payload() -> None:
    (values,) = rounds(1)
    assert encode(encoding(), parse({"type": "2bit"}), values).segment_counts == [len(SIZES)]
    assert encode(encoding(), parse({"type": "int8"}), values).segment_counts == [1] * len(SIZES)


@pytest.mark.parametrize("kind", ["2bit", "threshold"])
def test_a_threshold_counts_for_one_worker(kind: str) -> None:
    at, compression = encoding({1: 4}), parse({"type": kind, "threshold": 0.5})
    encoded = encode(at, compression, floats(1.9, 2.0, -2.1, 0.4), {1: 4}, workers=4)
    assert dict(encoded.codec[1])["threshold"] == 2.0
    assert arrived(encoded, {1: 4}).nonzero().flatten().tolist() == [1, 2]


def test_another_codec_goes_on_with_what_was_left_out() -> None:
    at, sizes = encoding({1: 3}), {1: 3}
    encode(at, parse({"type": "2bit", "threshold": 8.0}), floats(1, 2, 3), sizes)
    for kind, workers in (("topk", 1), ("2bit", 2), ("2bit", 4)):  # nothing reaches 16, or 32
        codec = parse(
            {"type": kind, "ratio": 1e-9, "momentum": 0.5} if kind == "topk" else {"type": kind, "threshold": 8.0}
        )
        encode(at, codec, torch.zeros(3), sizes, workers)
    assert torch.equal(kept(at, sizes), floats(1, 2, 0))
    exact = parse({"type": "threshold", "threshold": 1e-30})
    assert torch.equal(arrived(encode(at, exact, torch.zeros(3), sizes), sizes), floats(1, 2, 0))


@pytest.mark.parametrize("kind", ["2bit", "int8", "topk"])
def test_values_that_are_not_finite_change_nothing(kind: str) -> None:
    at, twin, compression = encoding(), encoding(), parse({"type": kind})
    first, second = rounds(2)
    bad = second.clone()
    bad[303] = torch.inf
    for one in (at, twin):
        encode(one, compression, first)
    with pytest.raises(UsageError, match=r"'key 4' has infinite or NaN"):
        encode(at, compression, bad)
    assert same_bits(arrived(encode(at, compression, second)), arrived(encode(twin, compression, second)))


@pytest.mark.parametrize(("codec", "error"), [(None, UsageError), (["3bit", []], UnknownName)])
def test_a_codec_that_is_none(codec: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        encoding().encode(codec, list(SIZES), list(SIZES.values()), rounds(1)[0])


@pytest.mark.parametrize("compression", HERE, ids=IDS)
def test_what_is_saved_and_loaded_goes_on_bit_for_bit(compression: Compression) -> None:
    at, other = encoding(), encoding()
    first, second, third = rounds(3)
    encode(at, compression, first)
    encode(at, compression, second)
    encode(other, compression, third)  # is forgotten
    other.put_states(put(states(at)))
    assert torch.equal(kept(at), kept(other)), "they may be saved again before anything is encoded"
    assert same_bits(arrived(encode(at, compression, third)), arrived(encode(other, compression, third)))
    assert same_bits(kept(at), kept(other))


def test_what_several_workers_load_is_added_up() -> None:
    compression = parse({"type": "topk", "ratio": 1e-9, "momentum": 0.5})
    workers = [encoding(), encoding()]
    for worker, values in zip(workers, rounds(2), strict=True):
        encode(worker, compression, values)
    loading = [put(states(worker), rank) for rank, worker in enumerate(workers)]
    here, there = encoding(), encoding()
    for at, messages in ((here, [*loading, *loading]), (there, loading[::-1])):  # again counts once, in any order
        for message in messages:
            at.put_states(message)
        for name in ("residual", "velocity"):
            assert torch.equal(kept(at, name=name), kept(workers[0], name=name) + kept(workers[1], name=name))
    encode(here, compression, rounds(1)[0])
    here.put_states(loading[0])  # and replaces what has been encoded since
    assert torch.equal(kept(here), kept(workers[0]))


def test_of_a_segment_that_has_not_been_encoded_there_is_nothing() -> None:
    assert states(encoding()).ids == []


RIGHT = [
    SegmentState(1, "residual", torch.zeros(300)),
    SegmentState(1, "step", torch.tensor(2)),
    SegmentState(1, "velocity", torch.zeros(300)),
]


@pytest.mark.parametrize(
    "wrong",
    [
        RIGHT[:1],
        RIGHT[1:],
        [*RIGHT, SegmentState(1, "basis", torch.zeros(300))],
        [RIGHT[0]._replace(value=torch.zeros(299)), *RIGHT[1:]],
        [RIGHT[0]._replace(value=torch.zeros(300, 1)), *RIGHT[1:]],
        [RIGHT[0]._replace(value=torch.zeros(300, dtype=torch.float64)), *RIGHT[1:]],
        [RIGHT[0]._replace(value=torch.full((300,), torch.nan)), *RIGHT[1:]],
        [*RIGHT[:2], RIGHT[2]._replace(value=torch.zeros(2))],
        [RIGHT[0], RIGHT[1]._replace(value=torch.tensor(-1)), RIGHT[2]],
        [RIGHT[0], RIGHT[1]._replace(value=torch.tensor(2.0)), RIGHT[2]],
        [RIGHT[0], RIGHT[1]._replace(value=torch.tensor([2])), RIGHT[2]],
    ],
    ids=str,
)
def test_states_of_something_else_are_refused(wrong: list[SegmentState]) -> None:
    at = encoding()
    at.put_states(wire.PutStates(sender(), 0, **pack_states(RIGHT)))
    before = kept(at, {1: 300})
    with pytest.raises(UsageError, match="'key 1': expected the residual of a compression for 300 elements"):
        at.put_states(wire.PutStates(sender(), 0, **pack_states(wrong)))
    assert torch.equal(kept(at, {1: 300}), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["fp16", "int8", "2bit"])
def test_a_compressed_reply_is_decoded_into_given_memory(kind: str, dtype: torch.dtype) -> None:
    (values,) = rounds(1)
    codec, lengths, counts, buffers = encode(encoding(), parse({"type": kind}), values)
    reply = sent(wire.Values(1, lengths=lengths, segment_counts=counts, buffers=buffers))
    out = torch.empty(values.numel(), dtype=dtype)
    encoding().decode(codec, reply, list(SIZES.values()), out)
    assert torch.equal(out, arrived(EncodedSum(codec, lengths, counts, buffers)).to(dtype))


def test_a_reply_that_is_none_of_these_segments() -> None:
    reply = wire.Values(1, lengths=[600], segment_counts=[1], buffers=[bytearray(600)])
    for codec, sizes in ((["fp16", []], [299]), (["fp16", []], [300, 300]), (None, [300])):
        with pytest.raises(WireError):
            encoding().decode(codec, reply, sizes, torch.empty(sum(sizes)))
