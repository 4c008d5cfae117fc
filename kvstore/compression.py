"""A store's compression, at the worker's end: what goes out is encoded, and what comes back is decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from kvstore.codecs import Compression, Compressor, Encoded, assign, parse
from kvstore.errors import WireError
from kvstore.plan import Plan
from kvstore.shares import Parcel
from kvstore.spec import FLOATS, Key
from kvstore.values import from_buffer, to_buffer
from kvstore.wire import Buffer, Codec, Values, join, tear

Encodings: TypeAlias = Mapping[Key, Encoded]

OFF = "none"


def describe(options: Mapping[str, object] | None) -> Compression | None:
    """Return what ``set_gradient_compression`` was given, checked; None if it turns compression off.

    Raises:
        UnknownName, UsageError: see ``kvstore.codecs.parse``.
    """
    if options is None or (isinstance(options, Mapping) and dict(options) == {"type": OFF}):
        return None
    return parse(options)


def travelling(compression: Compression | None) -> Codec:
    """Return one way of ``compression`` as messages carry it."""
    return None if compression is None else [compression.type, [list(pair) for pair in compression.numbers]]


class Compressing:
    """Encodes what one worker pushes to one store, and keeps what the encodings lack.

    Args:
        compression: how.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self._pushed = travelling(compression)
        self._pulled = travelling(compression.pull)
        self._compressor = Compressor(compression)

    def encode(self, plan: Plan, values: Sequence[torch.Tensor]) -> Encodings:
        """Return the encodings of a plan's arrays of floats."""
        return {
            key: self._compressor.encode(key, value)
            for key, entry, value in zip(plan.keys, plan.entries, values, strict=True)
            if entry.spec.dtype in FLOATS
        }

    def pushes(self, parcel: Parcel) -> Codec:
        """How a parcel's values go."""
        return self._pushed if parcel.dtype in FLOATS else None

    def asked(self, parcel: Parcel) -> Codec:
        """How a parcel's values are to come back."""
        return self._pulled if parcel.dtype in FLOATS else None

    def unpack(self, parcel: Parcel, reply: Values) -> Values:
        """Return ``reply``, to a request that asked for compressed values, as if it had asked for plain ones.

        Raises:
            WireError: its payloads are not those of the parcel's pieces.
        """
        back = self.compression.pull
        if back is None or parcel.dtype not in FLOATS:
            return reply
        sizes = [piece.stop - piece.start for piece in parcel.pieces]
        flat = decoded(back, reply.buffers, reply.lengths, sizes)
        return dataclasses.replace(reply, lengths=[], buffers=[to_buffer(flat.to(getattr(torch, parcel.dtype)))])

    def statistics(self) -> Any:
        """What has been encoded; see ``codecs.Statistics``."""
        return self._compressor.statistics()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What the encodings have lacked so far; see ``Compressor.state``."""
        return self._compressor.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, object]) -> None:
        """Take what ``state`` returned; see ``Compressor.load_state``."""
        self._compressor.load_state(tensors, plain)


def pack(parcel: Parcel, encodings: Encodings) -> tuple[list[int], list[Buffer]]:
    """Return the payloads of a parcel's pieces: the length of each, and the buffers of a message."""
    parts = [to_buffer(encodings[piece.key].cut(piece.start, piece.stop)) for piece in parcel.pieces]
    return [part.nbytes for part in parts], join(parts)


def decoded(
    compression: Compression, buffers: Sequence[Buffer], lengths: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the elements of payloads of known ``sizes``, back to back, as flat float32.

    Raises:
        WireError: they are no such payloads.
    """
    if len(lengths) != len(sizes):
        raise WireError(f"{len(lengths)} payloads for {len(sizes)} segments")
    flat = torch.empty(sum(sizes))
    parts = flat.split_with_sizes(list(sizes))
    for part, payload in zip(parts, tear(buffers, lengths), strict=True):
        assign(compression, from_buffer(payload, "uint8"), part)
    return flat
