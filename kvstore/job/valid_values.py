"""The kinds of values that environment variables may have: how each is read from text, and what is valid, in words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ValidValues(Generic[T]):
    """The values that a variable may have; ``valid`` names them. ``parse`` raises ValueError for other texts."""

    valid: str

    def parse(self, text: str) -> T:
        raise NotImplementedError


class Flag(ValidValues[bool]):
    """On or off, in upper or lower case."""

    valid = "1 or 0, true or false, yes or no, on or off"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word not in (*_ON, *_OFF):
            raise ValueError(text)
        return word in _ON


class Integer(ValidValues[int]):
    """An integer from ``least`` on, up to ``most`` if there is such a bound."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self._least, self._most = least, math.inf if most is None else most
        self.valid = f"an integer, at least {least}" if most is None else f"an integer, from {least} to {most}"

    def parse(self, text: str) -> int:
        value = int(text)
        if not self._least <= value <= self._most:
            raise ValueError(text)
        return value


class Fraction(ValidValues[float]):
    """A part of the whole: greater than 0, and at most 1."""

    valid = "a number greater than 0, at most 1"

    def parse(self, text: str) -> float:
        value = float(text)
        if not 0 < value <= 1:
            raise ValueError(text)
        return value


class Seconds(ValidValues[float]):
    """A finite time in seconds: at least ``least`` or, if that is None, greater than 0."""

    def __init__(self, least: float | None = None) -> None:
        self._least = math.nextafter(0, 1) if least is None else least
        self.valid = "a number of seconds, " + ("greater than 0" if least is None else f"at least {least:g}")

    def parse(self, text: str) -> float:
        value = float(text)
        if not self._least <= value < math.inf:  # False for nan, too
            raise ValueError(text)
        return value


class Interval(NamedTuple):
    """How often something happens: every so many rounds or every so many seconds; both 0 for never."""

    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.rounds}r" if self.rounds else f"{self.seconds:g}s" if self.seconds else "never"


class Intervals(ValidValues[Interval]):
    """A number of rounds (``500r``), a time in seconds, minutes or hours (``30s``, ``10m``, ``1h``), or ``never``."""

    valid = "a number of rounds such as 500r, a time such as 30s, 10m or 1h, or never"

    def parse(self, text: str) -> Interval:
        if text.lower() == "never":
            return Interval()
        number, unit = text[:-1], text[-1:].lower()
        if unit == "r":
            return Interval(Integer(1).parse(number))
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}.get(unit, math.nan)
        if not 0 < seconds < math.inf:
            raise ValueError(text)
        return Interval(0, seconds)


class RoundWindow(NamedTuple):
    """Some rounds in a row, which are counted from 1; both 0 for none."""

    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last else "none"


class RoundWindows(ValidValues[RoundWindow]):
    """How many rounds from the first on (``100``), the first and the last of them (``500-600``), or ``none``."""

    valid = "a number of rounds from the first on, such as 100, a first and a last one, such as 500-600, or none"
    _BOTH = re.compile(r"(?:([1-9]\d{0,14})-)?([1-9]\d{0,14})", re.ASCII)

    def parse(self, text: str) -> RoundWindow:
        if text.strip().lower() == "none":
            return RoundWindow()
        match = self._BOTH.fullmatch(text.strip())
        if match is None:
            raise ValueError(text)
        window = RoundWindow(int(match[1] or 1), int(match[2]))
        if window.last < window.first:
            raise ValueError(text)
        return window


class OneOf(ValidValues[str]):
    """One of several words, in upper or lower case."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self.valid = ", ".join(words)

    def parse(self, text: str) -> str:
        word = text.lower()
        if word not in self._words:
            raise ValueError(text)
        return word


class Text(ValidValues[str]):
    """Any text; ``valid`` says what it is."""

    def __init__(self, valid: str) -> None:
        self.valid = valid

    def parse(self, text: str) -> str:
        return text


class EarlierEnd(ValidValues["tuple[str, float] | tuple[()]"]):
    """How a process has ended, and when: words, and seconds of a host's monotonic clock."""

    valid = "words and a number of seconds, such as `SIGKILL 1234.5`"

    def parse(self, text: str) -> tuple[str, float]:
        how, when = text.rsplit(None, 1)
        return how, Seconds(0).parse(when)


class RoundFaults(ValidValues["tuple[tuple[str, int], ...]"]):
    """What a process does to itself, and at which round; by rounds."""

    valid = "`kill:ROUND` or `stop:ROUND`, separated by commas"
    _ONE = re.compile(r"(kill|stop):([1-9]\d{0,9})", re.ASCII)

    def parse(self, text: str) -> tuple[tuple[str, int], ...]:
        found = [self._ONE.fullmatch(item.strip()) for item in text.split(",")]
        faults = [(match[1], int(match[2])) for match in found if match is not None]
        if len(faults) < len(found):
            raise ValueError(text)
        return tuple(sorted(faults, key=lambda fault: fault[1]))


@dataclass(frozen=True)
class ClassReference:
    """Where a class is, and the name that it has here."""

    name: str
    module: str
    cls: str

    def __str__(self) -> str:
        return f"{self.name}={self.module}:{self.cls}"


class ClassReferences(ValidValues["tuple[ClassReference, ...]"]):
    """Classes, separated by commas; the name of one is its own, in lower case, if none is given."""

    valid = "`module:Class` or `name=module:Class`, separated by commas; no name twice"
    _ONE = re.compile(r"(?:([A-Za-z]\w{0,63})=)?([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)", re.ASCII)

    def parse(self, text: str) -> tuple[ClassReference, ...]:
        found: dict[str, ClassReference] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            match = self._ONE.fullmatch(word)
            if match is None:
                raise ValueError(text)
            name, module, cls = match.groups()
            name = (name or cls.rpartition(".")[2]).lower()
            if name in found:
                raise ValueError(text)
            found[name] = ClassReference(name, module, cls)
        return tuple(found.values())
