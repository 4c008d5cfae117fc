"""States in a message: they arrive as they were, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstore.errors import WireError
from kvstore.optim.state_messages import SegmentState, pack_states, unpack_states
from kvstore.wire import OptimizerStates, decode, encode

STATES = [
    SegmentState(3, "momentum", torch.arange(6.0).view(2, 3).t()),
    SegmentState(3, "step", torch.tensor(7)),
    SegmentState(1, "large", torch.ones(40_000, dtype=torch.float64)),
    SegmentState(1, "empty", torch.zeros(0, 4, dtype=torch.float16)),
]


def message() -> OptimizerStates:
    sent = encode(OptimizerStates(1, optimizer=None, **pack_states(STATES)))
    arrived = decode([bytearray(frame) for frame in sent])
    assert isinstance(arrived, OptimizerStates)
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
