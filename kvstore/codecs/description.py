"""How to compress, as messages carry it: a type and its numbers. What comes in a message is checked."""

from __future__ import annotations

from functools import lru_cache

from kvstore.codecs.options import Compression, parse
from kvstore.wire import CodecDescription


def travelling(compression: Compression | None) -> CodecDescription:
    """Return one way of ``compression`` as messages carry it."""
    return None if compression is None else [compression.type, [list(pair) for pair in compression.numbers]]


def described(codec: CodecDescription) -> Compression | None:
    """Return the compression that a message names; None if it names none.

    Raises:
        UsageError, UnknownName: see ``kvstore.codecs.parse``.
    """
    return None if codec is None else _parsed(codec[0], tuple((name, number) for name, number in codec[1]))


@lru_cache(maxsize=64)
def _parsed(kind: str, numbers: tuple[tuple[str, float | int | bool], ...]) -> Compression:
    return parse({"type": kind, **dict(numbers)})
