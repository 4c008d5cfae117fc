"""States of segments in a message, out and in: of optimizers, and of compression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvstore import wire
from kvstore.spec import Key, Spec
from kvstore.values import from_buffer, spec_of, split_like, to_buffer


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
        "buffers": wire.pack_arrays([to_buffer(state.value) for state in listed]),
    }


def unpack_states(message: wire.OptimizerStates | wire.PutStates | wire.StatesState) -> list[SegmentState]:
    """Return the states that a message carries, in its own memory.

    Raises:
        WireError: its buffers are not those of tensors of these shapes.
        UsageError: there can be no tensor of such a shape.
    """
    values = _unpacked(message, message.buffers)
    return list(map(SegmentState, message.ids, message.names, values))


def pack_parts(parts: Iterable[tuple[Sequence[int], str, torch.Tensor]]) -> tuple[dict[str, Any], list[wire.Buffer]]:
    """Return the fields of ``Updated`` that describe states, and the frames of these: their tensors, not copies.

    Args:
        parts: the segments that have each state, its name and value; see ``StateStore.parts``.
    """
    listed = list(parts)
    specs = [spec_of(value) for _, _, value in listed]
    fields = {
        "owners": [number for numbers, _, _ in listed for number in numbers],
        "counts": [len(numbers) for numbers, _, _ in listed],
        "names": [name for _, name, _ in listed],
        "shapes": [list(spec.shape) for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
    }
    return fields, wire.pack_arrays([to_buffer(value) for _, _, value in listed])


def unpack_parts(
    message: wire.Updated, frames: Sequence[wire.Buffer], shapes: Mapping[int, Sequence[int]]
) -> dict[tuple[Key, str], torch.Tensor]:
    """Return the states that ``message`` describes and ``frames`` carry, by segment and name, in their memory.

    Args:
        shapes: of the segments.

    Raises:
        WireError, UsageError: see ``unpack_states``.
        ValueError: a state does not have as many elements as its segments.
    """
    owners = iter(message.owners)
    states: dict[tuple[Key, str], torch.Tensor] = {}
    for count, name, value in zip(message.counts, message.names, _unpacked(message, frames), strict=True):
        numbers = list(itertools.islice(owners, count))
        if count == 1 or not value.dim():
            states |= {(number, name): value for number in numbers}
            continue
        sizes = [math.prod(shapes[number]) for number in numbers]
        if sum(sizes) != value.numel():
            raise ValueError(f"{value.numel()} elements of {name} for segments of {sizes}")
        parts = zip(numbers, split_like(value.view(-1), sizes), strict=True)
        states |= {(number, name): part.view(tuple(shapes[number])) for number, part in parts}
    return states


def _unpacked(
    message: wire.OptimizerStates | wire.PutStates | wire.StatesState | wire.Updated, frames: Sequence[wire.Buffer]
) -> list[torch.Tensor]:
    """Return the tensors that ``message`` describes, in the memory of ``frames``."""
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = wire.unpack_arrays(frames, [spec.nbytes for spec in specs])
    return [from_buffer(part, spec.dtype).view(spec.shape) for spec, part in zip(specs, parts, strict=True)]
