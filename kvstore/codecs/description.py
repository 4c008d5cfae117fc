"""How to compress, as messages carry it: a type and its numbers. What comes in a message is checked."""

from __future__ import annotations

from functools import lru_cache

from kvstore import wire
from kvstore.codecs.options import Compression, parse

_HALVES = frozenset({"fp16", "bf16"})


def travelling(compression: Compression | None) -> wire.CodecDescription:
    """Return one way of ``compression`` as messages carry it."""
    return None if compression is None else [compression.type, [list(pair) for pair in compression.numbers]]


def described(codec: wire.CodecDescription) -> Compression | None:
    """Return the compression that a message names; None if it names none.

    Raises:
        UsageError, UnknownName: see ``kvstore.codecs.parse``.
    """
    return None if codec is None else _parsed(codec[0], tuple((name, number) for name, number in codec[1]))


def fold(pushed: wire.CodecDescription, back: wire.CodecDescription) -> int:
    """By what factor a message has more elements than one without compression.

    Compression makes processors the bottleneck, not the wire, and a message costs them the same whatever its size.

    Args:
        pushed, back: how pushes, and values, travel.
    """
    if back is None:
        return 1
    halves = (pushed is not None and pushed[0] in _HALVES) + (back[0] in _HALVES)
    return (8, 4, 2)[halves]


@lru_cache(maxsize=64)
def _parsed(kind: str, numbers: tuple[tuple[str, float | int | bool], ...]) -> Compression:
    return parse({"type": kind, **dict(numbers)})
