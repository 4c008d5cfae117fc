"""States in a message: they arrive as they were, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.optim.states import SegmentState, pack_parts, pack_states, unpack_parts, unpack_states

STATES = [
    SegmentState(3, "momentum", torch.arange(6.0).view(2, 3).t()),
    SegmentState(3, "step", torch.tensor(7)),
    SegmentState(1, "large", torch.ones(40_000, dtype=torch.float64)),
    SegmentState(1, "empty", torch.zeros(0, 4, dtype=torch.float16)),
]


def message() -> wire.OptimizerStates:
    sent = wire.encode(wire.OptimizerStates(1, optimizer=None, **pack_states(STATES)))
    arrived = wire.decode([bytearray(frame) for frame in sent])
    assert isinstance(arrived, wire.OptimizerStates)
    return arrived


def test_they_arrive_as_they_were() -> None:
    arrived = unpack_states(message())
    assert [state[:2] for state in arrived] == [state[:2] for state in STATES]
    for (_, _, value), (_, _, expected) in zip(arrived, STATES, strict=True):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert torch.equal(value, expected)


def test_tensors_that_do_not_fit_their_shapes_are_refused() -> None:
    with pytest.raises(WireError):
        unpack_states(replace(message(), shapes=[[2, 2], [], [40_000], [0, 4]]))


SHAPES = {3: (2, 3), 1: (40_000,), 7: (2,)}
PARTS = [
    ((3, 1), "momentum", torch.arange(40_006.0)),
    ((3, 1), "step", torch.tensor(7.0)),
    ((7,), "momentum", torch.ones(2)),
]


def updated() -> tuple[wire.Updated, list[wire.Buffer]]:
    fields, frames = pack_parts(PARTS)
    sent = wire.encode(wire.Updated(0, list(SHAPES), [2, 1], [5, 5], **fields, buffers=frames))
    arrived = wire.decode([bytearray(frame) for frame in sent])
    assert isinstance(arrived, wire.Updated)
    return arrived, list(arrived.buffers)


def test_states_of_several_segments_arrive_as_those_of_each() -> None:
    arrived = unpack_parts(*updated(), SHAPES)
    momenta = PARTS[0][2]
    expected = {
        (3, "momentum"): momenta[:6].view(2, 3),
        (1, "momentum"): momenta[6:],
        (3, "step"): torch.tensor(7.0),
        (1, "step"): torch.tensor(7.0),
        (7, "momentum"): torch.ones(2),
    }
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[where], expected[where]) for where in expected)


def test_states_of_other_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="40006 elements of momentum for segments of"):
        unpack_parts(*updated(), {**SHAPES, 3: (2, 2)})
