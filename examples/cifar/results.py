"""The output of the comparisons: a table, a CSV file, and a plot."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class PlotError(Exception):
    """A plot was asked for, but matplotlib is missing. The message says what to install."""


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows under the names of their columns. The first column is left-aligned, the others right-aligned."""
    columns = list(rows[0])
    widths = [max(map(len, [column, *(row[column] for row in rows)])) for column in columns]
    lines = []
    for cells in (columns, *(row.values() for row in rows)):
        name, *others = zip(cells, widths, strict=True)
        lines.append("  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in others)]))
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows as CSV, with their keys as the first line."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def require_plots() -> None:
    """Raise `PlotError` before training if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a new figure with panels side by side. It needs no display."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(6 * panels, 4.5), layout="constrained")
    axes: Any = made.subplots(1, panels, squeeze=False)
    return made, list(axes[0])
