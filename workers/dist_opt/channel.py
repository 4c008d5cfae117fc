"""One way of summing over workers, for DistOpt: a store of its own, and how it compresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstore import KVStore, Unsupported
from kvstore.codecs import Compressor, decode, parse

# What comes back is a sum of what few workers have sent: all of it but zeros, exactly.
NOT_ZERO: Mapping[str, object] = {"type": "threshold", "threshold": 2.0**-126}


class Channel:
    """An all-reduce by key, of one kind: as values are, or compressed.

    A store in one process sends nothing, so it compresses nothing; here the values lose there what they would lose on
    their way, so that a script that runs alone does what each of its workers would.

    Args:
        store: synchronous, without optimizer, for this alone.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._known: set[str] = set()
        self._alone: list[Compressor] = []  # one for each way of the wire that is not there
        self._options: Mapping[str, object] | None = None

    def compress(self, options: Mapping[str, object], keep: bool = True) -> None:
        """Compress from now on.

        Args:
            options: see ``KVStore.set_gradient_compression``.
            keep: go on with what earlier encodings have lacked; if False, or the options differ, it is dropped.
        """
        if keep and options == self._options:
            return
        self._options = options
        try:
            self.store.set_gradient_compression(None)
            self.store.set_gradient_compression(options)
        except Unsupported:
            there = parse(options)
            self._alone = [Compressor(way) for way in (there, there.pull) if way is not None]

    def sum(self, messages: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace values by their sums over workers, which all call this with the same keys, shapes and dtypes.

        Args:
            messages: values by key; those that are to go together.
        """
        for values in messages:
            new = [key for key in values if key not in self._known]
            if new:
                self.store.init(new, [torch.zeros_like(values[key]) for key in new])
                self._known.update(new)
        for values in messages:
            for key, value in values.items():
                if value.is_floating_point():
                    self._lose(key, value)
        tickets = [self.store.pushpull(list(values), list(values.values()), wait=False) for values in messages]
        for ticket in tickets:
            ticket.wait()

    def broadcast(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace values by rank 0's; their keys are new."""
        self.store.broadcast(list(values), list(values.values()), list(values.values()))
        self._known.update(values)

    def _lose(self, key: str, value: torch.Tensor) -> None:
        for compressor in self._alone:
            encoded = compressor.encode(key, value)
            kept = decode(compressor.compression, encoded.payload(0, encoded.size), encoded.size)
            value.copy_(kept.view(value.shape))


def fuse(sizes: Sequence[int], threshold: int) -> list[list[int]]:
    """Return which values go together, by position: SINGA's fusion.

    Args:
        sizes: of each value in elements. One that is larger than the threshold goes alone; the others gather, in order,
            until together they are larger.
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
