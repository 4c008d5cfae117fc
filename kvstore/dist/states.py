"""The states of an optimizer, of whole arrays and of the pieces of them that servers hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvstore.dist.plans.entries import Entry, Piece
from kvstore.errors import UsageError
from kvstore.optim.states import States
from kvstore.spec import Key


def assemble(pieces: Mapping[tuple[Piece, str], torch.Tensor], entries: Mapping[Key, Entry]) -> States:
    """Put the states of pieces together to those of whole arrays, as if one server had held all."""
    by_state: dict[tuple[Key, str], list[tuple[Piece, torch.Tensor]]] = {}
    for (piece, name), value in pieces.items():
        by_state.setdefault((piece.key, name), []).append((piece, value))
    whole: States = {}
    for (key, name), parts in by_state.items():
        parts.sort(key=lambda part: part[0].start)
        values = [value for _, value in parts]
        if len(values) > 1 and values[0].dim():
            whole[key, name] = torch.cat([value.reshape(-1) for value in values]).view(entries[key].spec.shape)
        else:  # one piece, or a number that all pieces have alike (a step count)
            whole[key, name] = values[0]
    return whole


def cut(states: States, entries: Mapping[Key, Entry]) -> dict[tuple[Piece, str], torch.Tensor]:
    """Cut the states of whole arrays into those of their pieces; the inverse of ``assemble`` for any placement.

    Raises:
        UsageError: a state is not element by element, and its array is held in pieces.
    """
    pieces: dict[tuple[Piece, str], torch.Tensor] = {}
    for (key, name), value in states.items():
        entry = entries[key]
        for piece in entry.pieces:
            if not entry.cut or not value.dim():
                pieces[piece, name] = value
            elif value.numel() == entry.spec.size:
                pieces[piece, name] = value.reshape(-1)[piece.start : piece.stop]
            else:
                raise UsageError(f"{name} of key {key!r} cannot be cut over {entry.servers} servers")
    return pieces
