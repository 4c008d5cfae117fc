"""What an array is apart from its numbers: shape and dtype. Needs neither numpy nor torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.cached import cached
from kvstore.errors import KeyNotInitialized, Mismatch, UsageError, choices, nearest

Key: TypeAlias = "int | str"

ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HALVES = frozenset({"float16", "bfloat16"})
MAX_DIMS = 32
MAX_ELEMENTS = 2**48
MAX_KEY_CHARS = 1024
MIN_INT_KEY, MAX_INT_KEY = -(2**63), 2**64 - 1  # the integers of msgpack; the keys of ps-lite are unsigned
MAX_SEGMENTS = 1 << 19  # that the keys of one call are cut into: what says where they are must fit a message


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of one array; ``size`` in elements, ``nbytes`` in bytes."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise UsageError(f"dtype {self.dtype} cannot be stored; choose from {choices(ITEMSIZE)}")
        if len(self.shape) > MAX_DIMS or any(n < 0 for n in self.shape) or self.size > MAX_ELEMENTS:
            raise UsageError(
                f"shape {self.shape} cannot be stored: at most {MAX_DIMS} dimensions, none negative, and 2^48 elements"
            )

    @cached
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def sum_dtype(dtype: str) -> str:
    """Return the dtype in which values of ``dtype`` are summed, and in which their sum stays until it is used.

    Two float16 gradients of 40,000 have a sum that float16 lacks, though the update, or the mean, is well in range.
    """
    return "float32" if dtype in HALVES else dtype


def as_shape(given: Any) -> tuple[int, ...]:
    """Return ``given``, an integer or several, as the shape of an array.

    Raises:
        UsageError: there can be no such array.
    """
    try:
        shape = tuple(map(operator.index, given if isinstance(given, Iterable) else [given]))
    except TypeError:
        raise UsageError(f"a shape is an integer or a tuple of integers, not {given!r}") from None
    return Spec(shape, "int8").shape


def check_key(key: object) -> Key:
    """Return ``key`` if it can name an array: a str of 1 to 1024 characters, or an int from -2**63 to 2**64 - 1.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(key, str):
        if 0 < len(key) <= MAX_KEY_CHARS:
            if not key.isascii():
                _require_text(key)
            return key
        raise UsageError(f"a key must have 1 to {MAX_KEY_CHARS} characters, this one has {len(key)}")
    if isinstance(key, int) and not isinstance(key, bool):
        if MIN_INT_KEY <= key <= MAX_INT_KEY:
            return key
        raise UsageError(f"key {key} is out of range: an int key is from -2**63 to 2**64 - 1; pass str(key)")
    raise UsageError(f"a key is an int or a str, not {type(key).__name__}")


def kind_of(keys: Sequence[Any]) -> type | None:
    """Return ``int`` or ``str`` if all ``keys`` are of just that type and can name arrays; looks at thousands at once.

    None: not on the fast path; validate fully, with ``check_key``.
    """
    types = set(map(type, keys))
    if types == {int}:
        return int if min(keys) >= MIN_INT_KEY and max(keys) <= MAX_INT_KEY else None
    if types == {str}:
        lengths = set(map(len, keys))
        return str if min(lengths) > 0 and max(lengths) <= MAX_KEY_CHARS and all(map(str.isascii, keys)) else None
    return None


def _require_text(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"key {key!r} cannot be encoded as UTF-8 ({exc.reason}); use another name") from None


def require_same(key: Key, known: Spec, given: Spec, who: str) -> None:
    """Raise ``Mismatch`` unless ``given`` (described by ``who``) is what is ``known`` of ``key``."""
    if known != given:
        known_words, given_words = told_apart(known, given)
        raise Mismatch(f"key {key!r} is {known_words}, but {who} {given_words}")


def told_apart(known: Spec, given: Spec) -> tuple[str, str]:
    """Return two specs that differ as messages have them: in full where their short forms are the same."""
    if str(known) == str(given):
        return repr(known), repr(given)
    return str(known), str(given)


def require_floats(specs: Iterable[tuple[Key, Spec]]) -> None:
    """Raise ``Mismatch`` unless all are floating point, as an optimizer needs them."""
    for key, spec in specs:
        if spec.dtype not in FLOATS:
            raise Mismatch(
                f"key {key!r} is {spec}; an optimizer updates floating point only: make a second store, with "
                "kvstore.create, for what is summed"
            )


def without_value(key: Key, known: Collection[Key], where: str = "") -> KeyNotInitialized:
    """Return the error for a key that is not ``known``; it names the known key that may have been meant."""
    close = nearest(key, known)
    advice = f"did you mean {close!r}? A new key needs init first" if close else "call init first"
    return KeyNotInitialized(f"key {key!r} has no value{where}; {advice}")


def shorten(keys: Iterable[Key], most: int = 8) -> str:
    """Render keys for a message: the first few, and how many more."""
    listed = list(keys)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(repr(key) for key in listed[:most]) + more
