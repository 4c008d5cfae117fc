"""What the comparisons end with: a table to print, the same as CSV, and a picture."""

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
    """A picture is wanted that nothing here can draw; the message says what would help."""


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """The rows under the names of their columns; the first column is text, and the others are lined up at the right."""
    columns = list(rows[0])
    widths = [max(map(len, [column, *(row[column] for row in rows)])) for column in columns]
    lines = []
    for cells in (columns, *(row.values() for row in rows)):
        name, *others = zip(cells, widths, strict=True)
        lines.append("  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in others)]))
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """The rows, for a spreadsheet; their keys are the first line."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def require_plots() -> None:
    """Find out that there is no matplotlib before training, rather than after it."""
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def figure(panels: int) -> tuple[Figure, list[Axes]]:
    """A new figure with panels side by side; it needs no display."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(6 * panels, 4.5), layout="constrained")
    axes: Any = made.subplots(1, panels, squeeze=False)
    return made, list(axes[0])
