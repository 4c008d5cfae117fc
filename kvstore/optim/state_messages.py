"""States of segments in a message, out and in: of optimizers, and of compression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvstore.spec import Spec
from kvstore.values import from_buffer, spec_of, to_buffer
from kvstore.wire import OptimizerStates, PutStates, StatesState, pack_arrays, unpack_arrays


class SegmentState(NamedTuple):
    """One tensor of the state of segment ``id``."""

    id: int
    name: str
    value: torch.Tensor


def pack_states(states: Iterable[SegmentState]) -> dict[str, Any]:
    """Return the fields of ``OptimizerStates`` and ``PutStates`` that carry ``states``: their tensors, not copies."""
    listed = [SegmentState(number, name, value.detach().contiguous()) for number, name, value in states]
    specs = [spec_of(state.value) for state in listed]
    return {
        "ids": [state.id for state in listed],
        "names": [state.name for state in listed],
        "shapes": [list(spec.shape) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "buffers": pack_arrays([to_buffer(state.value) for state in listed]),
    }


def unpack_states(message: OptimizerStates | PutStates | StatesState) -> list[SegmentState]:
    """Return the states that a message carries, in its own memory.

    Raises:
        WireError: its buffers are not those of tensors of these shapes.
        UsageError: there can be no tensor of such a shape.
    """
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = unpack_arrays(message.buffers, [spec.nbytes for spec in specs])
    return [
        SegmentState(number, name, from_buffer(part, spec.dtype).view(spec.shape))
        for number, name, spec, part in zip(message.ids, message.names, specs, parts, strict=True)
    ]
