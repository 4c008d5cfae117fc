"""Tables of members: a row each or, of many, the usual values and the members that differ. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvstore.observing.quantities import UNKNOWN

FEW = 12  # up to so many members, each has a row
MOST_DIFFERENT = 8  # of more members, so many that differ
_SPREADS = 6.0  # median absolute deviations; normal values differ by so many once in 20,000

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """One number of each member; differences from the median below ``least``, or ``part`` of the median, are none."""

    title: str
    value: Callable[[T], float | None]
    show: Callable[[float], str]
    least: float
    part: float = 0.0


@dataclass(frozen=True)
class Label(Generic[T]):
    """A text of each member: members are never compared by it."""

    title: str
    text: Callable[[T], str]


@dataclass(frozen=True)
class TextLine:
    """A line for people; ``style`` is ``plain``, ``title``, ``bad``, ``odd`` or ``faint``: colors only."""

    text: str
    style: str = "plain"


@dataclass(frozen=True)
class TableRow:
    """One row: the first cell is aligned to the left."""

    cells: tuple[str, ...]
    style: str = "plain"


def member_table(
    rows: Sequence[T],
    columns: Sequence[Column[T]],
    name: Callable[[T], str],
    words: Callable[[T], str],
    notable: Callable[[T], bool],
    everybody: bool = False,
    labels: Sequence[Label[T]] = (),
) -> list[TextLine]:
    """Return a table of members: of few a row each, of many the usual values and the members that differ.

    A column in which nothing is known, or all is 0, is left out, and a label that is empty for all members.
    """
    if not rows:
        return []
    values = [[column.value(row) for row in rows] for column in columns]
    kept = [place for place, numbers in enumerate(values) if any(numbers)]
    columns, values = [columns[place] for place in kept], [values[place] for place in kept]
    labels = [label for label in labels if any(label.text(row) for row in rows)]
    different = differing(values, columns, len(rows))
    every = range(len(rows))
    summary: list[TableRow] = []
    shown: Collection[int] = every
    if len(rows) > FEW and not everybody:
        summary = [replace(row, cells=(*row.cells, *[""] * len(labels))) for row in _usual(values, columns, len(rows))]
        first = sorted(every, key=lambda row: (not notable(rows[row]), -different[row]))[:MOST_DIFFERENT]
        shown = sorted(row for row in first if notable(rows[row]) or different[row])
    head = TableRow(("", "state", *(column.title for column in columns), *(label.title for label in labels)), "faint")
    body = [
        TableRow(
            (
                name(rows[row]),
                words(rows[row]),
                *_cells([numbers[row] for numbers in values], columns),
                *(label.text(rows[row]) or UNKNOWN for label in labels),
            ),
            "bad" if notable(rows[row]) else "odd" if different[row] and len(rows) > 2 else "plain",
        )
        for row in shown
    ]
    lines = aligned([head, *summary, *body], len(labels))
    hidden = sum(1 for row in every if (notable(rows[row]) or different[row]) and row not in shown)
    if hidden:
        lines.append(TextLine(f"  {hidden} more differ from the rest; --all shows everybody", "faint"))
    elif summary and not body:
        lines.append(TextLine("  nobody differs from the rest; --all shows everybody", "faint"))
    return lines


def differing(values: Sequence[Sequence[float | None]], columns: Sequence[Column[T]], count: int) -> list[int]:
    """Return, for each of ``count`` members, in how many columns it differs from the rest."""
    different = [0] * count
    for numbers, column in zip(values, columns, strict=True):
        known = [number for number in numbers if number is not None]
        if len(known) < 3:  # of two that differ nobody can say which is the odd one
            continue
        middle = statistics.median(known)
        # Median deviations, not the standard deviation: that grows with the very member that differs, and hides it.
        spread = statistics.median(abs(number - middle) for number in known)
        limit = max(column.least, column.part * abs(middle), _SPREADS * spread)
        for row, number in enumerate(numbers):
            different[row] += number is not None and abs(number - middle) > limit
    return different


def aligned(rows: Sequence[TableRow], texts: int = 0) -> list[TextLine]:
    """Return rows as lines, their cells one below the other; the last ``texts`` columns are no numbers."""
    numbers = range(2, len(rows[0].cells) - texts)
    widths = [max(map(len, cells)) for cells in zip(*(row.cells for row in rows), strict=True)]
    return [
        TextLine(
            "  "
            + "  ".join(
                cell.rjust(width) if place in numbers else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row.cells, widths, strict=True))
            ).rstrip(),
            row.style,
        )
        for row in rows
    ]


def _usual(values: Sequence[Sequence[float | None]], columns: Sequence[Column[T]], count: int) -> list[TableRow]:
    """Return the lowest, the middle and the highest number of each column."""
    rows = []
    for title, of in (("lowest", min), ("median", statistics.median), ("highest", max)):
        numbers = [[number for number in row if number is not None] for row in values]
        cells = _cells([of(known) if known else None for known in numbers], columns)
        rows.append(TableRow((title, f"of {count}", *cells)))
    return rows


def _cells(numbers: Sequence[float | None], columns: Sequence[Column[T]]) -> list[str]:
    return [UNKNOWN if number is None else column.show(number) for number, column in zip(numbers, columns, strict=True)]
