"""The kinds of values that environment variables may have: how each is read from text, and what is valid, in words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ValidValues(Protocol[T_co]):
    """The values that a variable may have."""

    @property
    def valid(self) -> str:
        """Which these are, in words."""
        ...

    def parse(self, text: str) -> T_co:
        """Return the value that ``text`` stands for.

        Raises:
            ValueError: it stands for none.
        """
        ...


class Flag:
    """On or off, in upper or lower case."""

    valid = "1 or 0, true or false, yes or no, on or off"

    def parse(self, text: str) -> bool:
        """Return the value that ``text`` stands for."""
        word = text.lower()
        if word not in (*_ON, *_OFF):
            raise ValueError(text)
        return word in _ON


@dataclass(frozen=True)
class Integer:
    """An integer from ``least`` on, up to ``most`` if there is such a bound."""

    least: int
    most: int | None = None

    @property
    def valid(self) -> str:
        """Which these are, in words."""
        bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"an integer, {bounds}"

    def parse(self, text: str) -> int:
        """Return the value that ``text`` stands for."""
        value = int(text)
        if value < self.least or (self.most is not None and value > self.most):
            raise ValueError(text)
        return value


class Fraction:
    """A part of the whole: greater than 0, and at most 1."""

    valid = "a number greater than 0, at most 1"

    def parse(self, text: str) -> float:
        """Return the value that ``text`` stands for."""
        value = float(text)
        if not 0 < value <= 1:
            raise ValueError(text)
        return value


@dataclass(frozen=True)
class Seconds:
    """A finite time in seconds: at least ``least`` or, if that is None, greater than 0."""

    least: float | None = None

    @property
    def valid(self) -> str:
        """Which these are, in words."""
        return "a number of seconds, " + ("greater than 0" if self.least is None else f"at least {self.least:g}")

    def parse(self, text: str) -> float:
        """Return the value that ``text`` stands for."""
        value = float(text)
        if not (value > 0 if self.least is None else value >= self.least) or math.isinf(value):
            raise ValueError(text)
        return value


class Interval(NamedTuple):
    """How often something happens: every so many rounds or every so many seconds; both 0 for never."""

    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.rounds}r" if self.rounds else f"{self.seconds:g}s" if self.seconds else "never"


class Intervals:
    """A number of rounds (``500r``), a time in seconds, minutes or hours (``30s``, ``10m``, ``1h``), or ``never``."""

    valid = "a number of rounds such as 500r, a time such as 30s, 10m or 1h, or never"

    def parse(self, text: str) -> Interval:
        """Return the value that ``text`` stands for."""
        if text.lower() == "never":
            return Interval()
        number, unit = text[:-1], text[-1:].lower()
        if unit == "r":
            rounds = int(number)
            if rounds < 1:
                raise ValueError(text)
            return Interval(rounds, 0.0)
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


class RoundWindows:
    """How many rounds from the first on (``100``), the first and the last of them (``500-600``), or ``none``."""

    valid = "a number of rounds from the first on, such as 100, a first and a last one, such as 500-600, or none"
    _BOTH = re.compile(r"(?:([1-9]\d{0,14})-)?([1-9]\d{0,14})", re.ASCII)

    def parse(self, text: str) -> RoundWindow:
        """Return the value that ``text`` stands for."""
        if text.strip().lower() == "none":
            return RoundWindow()
        match = self._BOTH.fullmatch(text.strip())
        if match is None:
            raise ValueError(text)
        window = RoundWindow(int(match[1] or 1), int(match[2]))
        if window.last < window.first:
            raise ValueError(text)
        return window


@dataclass(frozen=True)
class OneOf:
    """One of several words, in upper or lower case."""

    words: tuple[str, ...]

    @property
    def valid(self) -> str:
        """Which these are, in words."""
        return ", ".join(self.words)

    def parse(self, text: str) -> str:
        """Return the value that ``text`` stands for."""
        word = text.lower()
        if word not in self.words:
            raise ValueError(text)
        return word


@dataclass(frozen=True)
class Text:
    """Any text; ``valid`` says what it is."""

    valid: str

    def parse(self, text: str) -> str:
        """Return the value that ``text`` stands for."""
        return text


class EarlierEnd:
    """How a process has ended, and when: words, and seconds of a host's monotonic clock."""

    valid = "words and a number of seconds, such as `SIGKILL 1234.5`"

    def parse(self, text: str) -> tuple[str, float]:
        """Return the value that ``text`` stands for."""
        how, when = text.rsplit(None, 1)
        return how, Seconds(0).parse(when)


class RoundFaults:
    """What a process does to itself, and at which round; by rounds."""

    valid = "`kill:ROUND` or `stop:ROUND`, separated by commas"
    _ONE = re.compile(r"(kill|stop):([1-9]\d{0,9})", re.ASCII)

    def parse(self, text: str) -> tuple[tuple[str, int], ...]:
        """Return the value that ``text`` stands for."""
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


class ClassReferences:
    """Classes, separated by commas; the name of one is its own, in lower case, if none is given."""

    valid = "`module:Class` or `name=module:Class`, separated by commas; no name twice"
    _ONE = re.compile(r"(?:([A-Za-z]\w{0,63})=)?([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)", re.ASCII)

    def parse(self, text: str) -> tuple[ClassReference, ...]:
        """Return the value that ``text`` stands for."""
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
