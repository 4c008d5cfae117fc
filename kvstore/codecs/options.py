"""How to compress, as callers say it and as messages carry it: a type and numbers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvstore import wire
from kvstore.errors import UnknownName, UsageError, choices, meant
from kvstore.plain import scalar

# With these, each decoded array is close to the encoded one. With the others only sums over many rounds are, which is
# enough for gradients but not for weights.
CLOSE = frozenset({"fp16", "bf16", "int8"})

# Numbers that have the unit of one worker's gradient. In a sum of n of them, n times as much means the same.
_OF_ONE = frozenset({("2bit", "threshold"), ("threshold", "threshold")})

_TINY, _HUGE = 2.0**-126, 2.0**126  # normal numbers of float32, of which some can be added


@dataclass(frozen=True)
class _Number:
    """A parameter: its default, and the range it must be in; ``kind`` is float, int or bool."""

    default: float | int | bool | None
    low: float
    high: float
    kind: type = float

    def check(self, name: str, value: Any) -> float | int | bool:
        """Return ``value``, converted to this parameter's kind.

        Raises:
            UsageError: it is of another kind, or out of range.
        """
        value = scalar(value)
        if self.kind is bool:
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r} must be True or False")
            return value
        valid = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, valid) or not self.low <= value <= self.high:
            kind = "an integer" if self.kind is int else "a number"
            raise UsageError(f"{name}={value!r} must be {kind} from {self.low:g} to {self.high:g}")
        number: float | int = self.kind(value)
        return number


_POSITIVE = (_TINY, _HUGE)
_SEED = _Number(0, 0, 2**32 - 1, int)
_PART = {"ratio": _Number(0.01, 1e-9, 1.0), "k": _Number(None, 1, 2**31 - 1, int)}
_MOMENTUM = _Number(0.0, 0.0, 0.999999)

_PARAMETERS: dict[str, dict[str, _Number]] = {
    "fp16": {},
    "bf16": {},
    "2bit": {"threshold": _Number(0.5, *_POSITIVE)},
    "1bit": {"threshold": _Number(0.5, -_HUGE, _HUGE)},
    "topk": {**_PART, "momentum": _MOMENTUM, "warmup_steps": _Number(0, 0, 2**31 - 1, int)},
    "threshold": {"threshold": _Number(0.05, *_POSITIVE), "momentum": _MOMENTUM},
    "randomk": {**_PART, "seed": _SEED},
    "int8": {"stochastic": _Number(False, 0, 1, bool), "seed": _SEED},
    "powersgd": {"rank": _Number(2, 1, 256, int), "seed": _SEED},
}


@dataclass(frozen=True)
class Compression:
    """A checked description of how to compress; ``parse`` makes it.

    Attributes:
        numbers: its parameters with their values, defaults included, in the order of names.
    """

    type: str  # one of ``names()``
    numbers: tuple[tuple[str, float | int | bool], ...] = ()
    pull: Compression | None = None  # how values are compressed on the way back; None if they are not

    def number(self, name: str) -> Any:
        return dict(self.numbers).get(name)

    def of_sum(self, terms: int) -> Compression:
        """Return this way for the sum of so many arrays: a threshold counts for one of them."""
        numbers = tuple(
            (name, min(value * terms, _HUGE) if (self.type, name) in _OF_ONE else value) for name, value in self.numbers
        )
        return self if terms == 1 else replace(self, numbers=numbers)

    def options(self) -> dict[str, object]:
        """Return the options that ``parse`` makes this from; ``pull`` is None or other such options."""
        return {"type": self.type, **dict(self.numbers), "pull": self.pull and self.pull.options()}


def names() -> list[str]:
    return sorted(_PARAMETERS)


def parse(options: Mapping[str, object]) -> Compression:
    """Return the compression that ``options`` describe.

    Args:
        options: ``type``, one of ``names()``; ``pull``, None, a type, or such options, for the way back; and
            parameters:

            - ``2bit``: ``threshold`` (0.5), positive.
            - ``1bit``: ``threshold`` (0.5).
            - ``topk``: ``ratio`` (0.01) of the elements or ``k`` of them; ``momentum`` (0), ``warmup_steps`` (0).
            - ``threshold``: ``threshold`` (0.05), positive; ``momentum`` (0).
            - ``randomk``: ``ratio`` (0.01) or ``k``; ``seed`` (0).
            - ``int8``: ``stochastic`` (False) rounding; ``seed`` (0).
            - ``powersgd``: ``rank`` (2); ``seed`` (0).

    Raises:
        UnknownName: no such type or parameter; the message lists those there are.
        UsageError: a parameter is not a number or is out of range, or two exclude each other.
    """
    given = _mapping(options)
    back = given.pop("pull", None)
    pull = None
    if back is not None:
        inner = _mapping({"type": back} if isinstance(back, str) else back)
        if inner.pop("pull", None) is not None:
            raise UsageError("pull describes the way back alone; it cannot have a pull of its own")
        pull = _one_way(inner)
    return _one_way(given, pull)


OFF = "none"


def chosen(options: Mapping[str, object] | None) -> Compression | None:
    """Return what ``set_gradient_compression`` was given, checked; None if it turns compression off."""
    if options is None or (isinstance(options, Mapping) and dict(options) == {"type": OFF}):
        return None
    return parse(options)


def _mapping(options: object) -> dict[str, object]:
    if not isinstance(options, Mapping):
        raise UsageError(f"compression must be a dict such as {{'type': '2bit'}}, not {type(options).__name__}")
    return dict(options)


def _one_way(given: dict[str, object], pull: Compression | None = None) -> Compression:
    if "type" not in given:
        raise UsageError(f"compression needs a 'type': {choices(_PARAMETERS)}")
    kind = given.pop("type")
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        raise UnknownName(f"no compression {kind!r}; choose from {choices(_PARAMETERS)}{meant(kind, _PARAMETERS)}")
    valid = _PARAMETERS[kind]
    for name in given:
        if name not in valid:
            known = {*valid, "type", "pull"}
            raise UnknownName(f"{kind} compression has no {name!r}; choose from {choices(known)}{meant(name, known)}")
    if given.get("ratio") is not None and given.get("k") is not None:
        raise UsageError(f"{kind} compression sends a ratio of the elements, or k of them; give ratio or k, not both")
    numbers = {name: number.default for name, number in valid.items()}
    if given.get("k") is not None:
        numbers["ratio"] = None
    numbers |= {name: valid[name].check(name, value) for name, value in given.items() if value is not None}
    return Compression(kind, tuple((name, value) for name, value in sorted(numbers.items()) if value is not None), pull)


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
    """
    if back is None:
        return 1
    halves = (pushed is not None and pushed[0] in _HALVES) + (back[0] in _HALVES)
    return (8, 4, 2)[halves]


@lru_cache(maxsize=64)
def _parsed(kind: str, numbers: tuple[tuple[str, float | int | bool], ...]) -> Compression:
    return parse({"type": kind, **dict(numbers)})
