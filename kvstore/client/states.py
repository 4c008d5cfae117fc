"""Optimizer states of whole arrays, and of the segments that servers hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvstore.client.plans.entries import Entry, Segment
from kvstore.errors import UsageError
from kvstore.optim.states import StateTensors
from kvstore.spec import Key

AT_ONCE = 64 << 20  # bytes of values whose states go in one message, which may have 2^16 frames


def assemble(segments: Mapping[tuple[Segment, str], torch.Tensor], entries: Mapping[Key, Entry]) -> StateTensors:
    """Join the states of segments into those of whole arrays, as if one server held everything."""
    by_state: dict[tuple[Key, str], list[tuple[Segment, torch.Tensor]]] = {}
    for (segment, name), value in segments.items():
        by_state.setdefault((segment.key, name), []).append((segment, value))
    whole: StateTensors = {}
    for (key, name), parts in by_state.items():
        parts.sort(key=lambda part: part[0].start)
        values = [value for _, value in parts]
        if len(values) > 1 and values[0].dim():
            whole[key, name] = torch.cat([value.reshape(-1) for value in values]).view(entries[key].spec.shape)
        else:  # one segment, or a number that all segments have alike (a step count)
            whole[key, name] = values[0]
    return whole


def cut(states: StateTensors, entries: Mapping[Key, Entry]) -> dict[tuple[Segment, str], torch.Tensor]:
    """Cut the states of whole arrays into those of their segments; the inverse of ``assemble`` for any placement.

    Raises:
        UsageError: a state has another number of elements than its array, which is cut.
    """
    segments: dict[tuple[Segment, str], torch.Tensor] = {}
    for (key, name), value in states.items():
        entry = entries[key]
        for segment in entry.segments:
            if not entry.cut or not value.dim():
                segments[segment, name] = value
            elif value.numel() == entry.spec.size:
                segments[segment, name] = value.reshape(-1)[segment.start : segment.stop]
            else:
                raise UsageError(f"{name} of key {key!r} cannot be cut over {entry.servers} servers")
    return segments
