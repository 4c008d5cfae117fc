"""Measured figures: rows of samples, results that compare rows, and curves. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Row:
    """The samples of one contender, in the unit of its result.

    Attributes:
        name: the contender's.
        samples: one for each round of every repeat; empty if it could not run.
        note: what else there is to say; why there are no samples, for one.
    """

    name: str
    samples: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        """The smallest sample."""
        return min(self.samples)

    def to_json(self) -> Json:
        """Return the fields, and the statistics."""
        known = {"median": self.median, "least": self.least} if self.samples else {}
        return {"name": self.name, "note": self.note, **known, "samples": [round(sample, 4) for sample in self.samples]}


@dataclass
class Result:
    """Contenders at the same work in the same run. Machines drift, so only such figures are comparable.

    Attributes:
        name: what targets call it by.
        title: what the contenders did.
        rows: one for each of them.
        peers: the names of those that the others are compared with.
        unit: of all samples.
    """

    name: str
    title: str
    rows: list[Row]
    peers: Sequence[str] = ()
    unit: str = "ms"

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if it has samples."""
        return next((row for row in self.rows if row.name == name and row.samples), None)

    def ratio(self, name: str, peer: str) -> float | None:
        """Return the median of the row ``name`` divided by that of ``peer``; None if one was not measured."""
        one, other = self.row(name), self.row(peer)
        return one.median / other.median if one is not None and other is not None and other.median else None

    def to_json(self) -> Json:
        """Return the result and the ratios to the peers."""
        ratios: dict[str, dict[str, float]] = {}
        for row in self.rows:
            known = {peer: self.ratio(row.name, peer) for peer in self.peers if peer != row.name}
            ratios[row.name] = {peer: round(ratio, 4) for peer, ratio in known.items() if ratio is not None}
        rows = [row.to_json() | {"ratios": ratios[row.name]} for row in self.rows]
        return {"name": self.name, "title": self.title, "unit": self.unit, "rows": rows}


@dataclass
class Curve:
    """How figures depend on a parameter: for each contender, pairs of the parameter and the figure.

    Attributes:
        name, title: as a result's.
        along: what was chosen.
        unit: of what came out.
        lines: pairs by contender, in ascending order.
        logarithmic: whether ``along`` spans several powers of ten.
    """

    name: str
    title: str
    along: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    logarithmic: bool = True

    def to_json(self) -> Json:
        """Return the curve."""
        return asdict(self)


def curve_of(name: str, title: str, along: str, results: Mapping[float, Result], logarithmic: bool = True) -> Curve:
    """Return the medians of the same contenders in several results, by the parameter of each."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for chosen, result in sorted(results.items()):
        for row in result.rows:
            if row.samples:
                lines.setdefault(row.name, []).append((chosen, row.median))
    unit = next(iter(results.values())).unit if results else "ms"
    return Curve(name, title, along, unit, lines, logarithmic)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of the second number over the first; 0 for fewer than two points."""
    if len({x for x, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
