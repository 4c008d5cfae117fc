"""Batches that a generator of ours has read ahead: samplers do not count them as used."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager


class _Readers(threading.local):
    """The containers into which batches are read now, in this thread."""

    def __init__(self) -> None:
        self.waiting: list[Sized] = []


_readers = _Readers()


@contextmanager
def reading_into(container: Sized) -> Iterator[None]:
    """Say during the block that what is read goes into ``container``, and is removed when the program is given it."""
    _readers.waiting.append(container)
    try:
        yield
    finally:
        _readers.waiting.pop()


def waiting() -> list[Sized]:
    return list(_readers.waiting)
