"""A store's compression, at the worker's end: what goes out is encoded, and what comes back is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvstore.codecs import Compression, Compressor, Encoded, Opened, opened, parse
from kvstore.errors import WireError
from kvstore.packer import Load, Packer, Plain
from kvstore.plan import Plan
from kvstore.shares import Parcel
from kvstore.spec import FLOATS, Key
from kvstore.values import Leaving, from_buffer, to_buffer
from kvstore.wire import Buffer, Codec, Values, join, tear

OFF = "none"
_HALVES = frozenset({"fp16", "bf16"})


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

    @property
    def fold(self) -> int:
        """How many times more of the arrays a message has than one of theirs as they are.

        Fewer bytes are on the wire then, and processors are what is short: a message costs them the same as ever.
        """
        back = self.compression.pull
        if back is None:
            return 1
        halves = (self.compression.type in _HALVES) + (back.type in _HALVES)
        return (8, 4, 2)[halves]

    def load(self, plan: Plan, values: Sequence[torch.Tensor], packer: Packer) -> Load:
        """Return what a push of a plan's arrays carries.

        Raises:
            UsageError: some of them have elements that are infinite or NaN; nothing has been encoded.
        """
        floats = {
            key: value
            for key, entry, value in zip(plan.keys, plan.entries, values, strict=True)
            if entry.spec.dtype in FLOATS
        }
        for key, value in floats.items():
            self._compressor.require_finite(key, value)
        return _Compressed(self._compressor, self._pushed, floats, Plain(packer, Leaving(values)))

    def asked(self, parcel: Parcel) -> Codec:
        """How a parcel's values are to come back."""
        return self._pulled if parcel.dtype in FLOATS else None

    def decoder(self, parcel: Parcel) -> Callable[[Values, Sequence[torch.Tensor]], None] | None:
        """Return what writes the reply for a parcel into flat float32, one for each piece; None if it comes plain."""
        back = self.compression.pull
        if back is None or parcel.dtype not in FLOATS:
            return None

        def decode(reply: Values, targets: Sequence[torch.Tensor]) -> None:
            ways = opened_each(back, reply.buffers, reply.lengths, [target.numel() for target in targets])
            for way, target in zip(ways, targets, strict=True):
                way(target, False)

        return decode

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """What the encodings have lacked so far; see ``Compressor.state``."""
        return self._compressor.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, object]) -> None:
        """Take what ``state`` returned; see ``Compressor.load_state``."""
        self._compressor.load_state(tensors, plain)


class _Compressed:
    """See ``Load``. An array is encoded when the first of it goes, so that the wire need not wait for all of them."""

    def __init__(self, compressor: Compressor, codec: Codec, values: Mapping[Key, torch.Tensor], others: Load) -> None:
        self._compressor, self._codec, self._others = compressor, codec, others
        self._values = values
        self._encoded: dict[Key, Encoded] = {}

    def pack(self, parcel: Parcel, gather: bool) -> tuple[Codec, list[int], list[Buffer]]:
        """See ``Load``."""
        if parcel.dtype not in FLOATS:
            return self._others.pack(parcel, gather)
        parts = [to_buffer(self._encoding(piece.key).cut(piece.start, piece.stop)) for piece in parcel.pieces]
        return self._codec, [part.nbytes for part in parts], join(parts)

    def _encoding(self, key: Key) -> Encoded:
        found = self._encoded.get(key)
        if found is None:
            found = self._encoded[key] = self._compressor.encode(key, self._values[key])
        return found


def opened_each(
    compression: Compression, buffers: Sequence[Buffer], lengths: Sequence[int], sizes: Sequence[int]
) -> list[Opened]:
    """Return what decodes each of a message's payloads, of known ``sizes``.

    Raises:
        WireError: they are no such payloads.
    """
    if len(lengths) != len(sizes):
        raise WireError(f"{len(lengths)} payloads for {len(sizes)} segments")
    payloads = tear(buffers, lengths)
    return [
        opened(compression, from_buffer(payload, "uint8"), size) for payload, size in zip(payloads, sizes, strict=True)
    ]
