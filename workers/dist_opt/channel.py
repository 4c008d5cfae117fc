"""An all-reduce for ``DistOpt``, through its own store, compressed or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstore import KVStore, Unsupported
from kvstore.codecs import Compressor, decode, parse

# The sums on the way back are mostly zeros: everything else is sent, exactly.
NOT_ZERO: Mapping[str, object] = {"type": "threshold", "threshold": 2.0**-126}


class Channel:
    """An all-reduce by key, either plain or compressed.

    A store in one process sends nothing, and so compresses nothing. There, values lose here what compression would take
    from them, so that a script gives the same results alone as in a job of one worker.

    Args:
        store: a synchronous store without optimizer, for this alone.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._known: set[str] = set()
        self._alone: list[Compressor] = []  # alone: a compressor for the way up, and one for the way back
        self._options: Mapping[str, object] | None = None

    def compress(self, options: Mapping[str, object], keep: bool = True) -> None:
        """Compress from now on.

        Args:
            options: see ``KVStore.set_gradient_compression``.
            keep: keep the residuals of earlier encodings. They are dropped if this is False or the options differ.
        """
        if keep and options == self._options:
            return
        self._options = options
        try:
            self.store.set_gradient_compression(None)
            self.store.set_gradient_compression(options)
        except Unsupported:
            upward = parse(options)
            self._alone = [Compressor(way) for way in (upward, upward.pull) if way is not None]

    def sum(self, messages: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace values by their sums over workers. All workers call this with the same keys, shapes and dtypes.

        Args:
            messages: values by key, one dict for each message.
        """
        for values in messages:
            self.prepare(values)
        for values in messages:
            for key, value in values.items():
                if value.is_floating_point():
                    self._lose(key, value)
        tickets = [self.store.pushpull(list(values), list(values.values()), wait=False) for values in messages]
        for ticket in tickets:
            ticket.wait()

    def prepare(self, values: Mapping[str, torch.Tensor]) -> None:
        """Make the keys of ``values`` that are new. All workers call this."""
        new = [key for key in values if key not in self._known]
        if new:
            self.store.init(new, [torch.zeros_like(values[key]) for key in new])
            self._known.update(new)

    def broadcast(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace values by those of rank 0; their keys must be new."""
        self.store.broadcast(list(values), list(values.values()), list(values.values()))
        self._known.update(values)

    def _lose(self, key: str, value: torch.Tensor) -> None:
        for compressor in self._alone:
            encoded = compressor.encode(key, value)
            kept = decode(compressor.compression, encoded.payload(0, encoded.size), encoded.size)
            value.copy_(kept.view(value.shape))


def fuse(sizes: Sequence[int], threshold: int) -> list[list[int]]:
    """Return the positions of the values that share a message: SINGA's fusion.

    A value larger than the threshold gets a message of its own. Smaller ones gather, in order, until they are together
    larger than the threshold.

    Args:
        sizes: the size of each value, in elements.
        threshold: in elements.
    """
    groups: list[list[int]] = []
    held: list[int] = []
    for position, size in enumerate(sizes):
        if size > threshold:
            groups.append([position])
            continue
        held.append(position)
        if sum(sizes[i] for i in held) > threshold:
            groups.append(held)
            held = []
    return [*groups, held] if held else groups
