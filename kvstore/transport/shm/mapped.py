"""A peer's arena as its reader sees it: it maps chunks on first use, and turns references into views.

Everything that a peer sends is checked before it is used: names, sizes, offsets, cells. Mappings live as long as views
of them, whatever becomes of the message, the transport and the peer. Pages that are not read are not populated, and
cost nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from kvstore.errors import WireError
from kvstore.transport.shm.presence import CELLS, CELLS_AT, FREE, HELD, SENT, Presence, open_control, open_peers
from kvstore.transport.system_errors import require_systems

Bytes = npt.NDArray[np.uint8]


class _ReferenceView(weakref.ref[Bytes]):
    """Notices when the last view of a reference is gone."""

    __slots__ = ("cell", "mapped")
    cell: int
    mapped: Mapped


# A weak reference must live to be called. It keeps our presence locked too, or the peer would take us for dead.
_views: dict[int, _ReferenceView] = {}


def _let_go(view: weakref.ref[Bytes]) -> None:
    """Tell the owner that its memory is free. Runs at any time, in any thread."""
    if isinstance(view, _ReferenceView) and _views.pop(id(view), None) is not None:
        view.mapped.let_go(view.cell)


class Mapped:
    """The arena of one peer.

    Args:
        name: the arena's name.
        nonce: what its control file must begin with.
        presence: this process's, by which the peer knows how long this process may hold what it sends.

    Raises:
        WireError: this host has no such arena: the peer is on another host, or lies.
    """

    def __init__(self, name: str, nonce: bytes, presence: Presence) -> None:
        self.name = name
        self._presence = presence
        fd, size = open_control(name, nonce)
        self._cells = memoryview(_mapping(fd, size))[CELLS_AT:]
        self._chunks: dict[int, Bytes] = {}

    def view(self, number: int, cell: int, offset: int, length: int) -> memoryview:
        """Return a view of what a reference refers to. The memory does not change until its last view is dropped.

        Raises:
            WireError: the reference is out of bounds, or was not sent.
        """
        chunk = self._chunks.get(number)
        if chunk is None:
            fd, size = open_peers(self.name, number + 1)
            chunk = self._chunks[number] = np.frombuffer(_mapping(fd, size), np.uint8)
        if length == 0 or offset + length > len(chunk):
            raise WireError(f"a reference to {length} bytes at {offset} of {len(chunk)}")
        if cell >= CELLS or self._cells[cell] != SENT:
            raise WireError("a reference that was not sent, or was received before")
        array = chunk[offset : offset + length]
        view = _ReferenceView(array, _let_go)
        view.cell, view.mapped = cell, self
        _views[id(view)] = view
        self._cells[cell] = HELD
        return array.data

    def let_go(self, cell: int) -> None:
        """Give the memory back to the owner. In a child after fork, that is left to the parent."""
        if not self._presence.inherited:
            self._cells[cell] = FREE


def _mapping(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except (OSError, ValueError) as exc:
        require_systems(exc)
        raise WireError(f"shared memory cannot be mapped: {exc}") from None
    finally:
        os.close(fd)
