"""From the wire into the caller's arrays: takes the values of pieces as they come, whatever device and strides wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kvstore.shares import Entry, Share
from kvstore.spec import Key
from kvstore.values import from_buffer, from_host
from kvstore.wire import Values, tear


class Writer:
    """Writes ``outs``, one or more arrays for each key, from the replies of the servers that hold the values."""

    def __init__(self, outs: Mapping[Key, Sequence[torch.Tensor]], entries: Mapping[Key, Entry]) -> None:
        self._outs = {key: list(tensors) for key, tensors in outs.items()}
        self._entries = entries
        self._staged: dict[Key, torch.Tensor] = {}
        self._missing = {key: len(entries[key].pieces) for key in outs}

    def taker(self, share: Share) -> Callable[[Values], None]:
        """Return what takes the reply of the server of ``share``."""

        def take(reply: Values) -> None:
            for piece, part in zip(share.pieces, tear(reply.buffers, share.sizes), strict=True):
                self._write(piece.key, piece.start, piece.stop, part)

        return take

    def _write(self, key: Key, start: int, stop: int, part: memoryview) -> None:
        entry, outs = self._entries[key], self._outs[key]
        flat = from_buffer(part, entry.spec.dtype)
        if not entry.cut:
            from_host(flat, outs)
            return
        plain = [out.view(-1)[start:stop] for out in outs if out.is_contiguous()]
        from_host(flat, plain)
        if len(plain) < len(outs):  # strides have no flat view: collect the pieces first
            staged = self._staged.setdefault(key, torch.empty(entry.spec.size, dtype=flat.dtype))
            staged[start:stop] = flat
            self._missing[key] -= 1
            if not self._missing[key]:
                from_host(self._staged.pop(key), [out for out in outs if not out.is_contiguous()])
