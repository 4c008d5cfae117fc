"""Results, curves and verdicts as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Curve, Result
from benchmarks.targets import Verdict


def number(value: float | None) -> str:
    """Format a figure with its significant digits; None is empty."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def result_table(result: Result) -> Group:
    """Return a table with a line for each row: median, minimum, and ratios of the medians to the peers'."""
    peers = [peer for peer in result.peers if result.row(peer) is not None]
    noted = any(row.note for row in result.rows)
    table = _table(["", f"median, {result.unit}", f"least, {result.unit}"])
    for peer in peers:
        table.add_column(f"÷ {peer}", justify="right")
    if noted:
        table.add_column("", overflow="fold")
    for row in result.rows:
        figures = [number(row.median), number(row.least)] if row.samples else ["", ""]
        ratios = ["" if peer == row.name else number(result.ratio(row.name, peer)) for peer in peers]
        table.add_row(row.name, *figures, *ratios, *([row.note] if noted else []))
    return _titled(result.title, table)


def curve_table(curve: Curve) -> Group:
    """Return a table with a line for each value of the parameter, and a column for each contender."""
    table = _table([curve.along, *curve.lines])
    for chosen in sorted({x for line in curve.lines.values() for x, _ in line}):
        figures = [dict(line).get(chosen) for line in curve.lines.values()]
        table.add_row(f"{chosen:,.0f}", *(number(figure) for figure in figures))
    return _titled(f"{curve.title}, {curve.unit}", table)


def verdict_table(verdicts: Sequence[Verdict]) -> Group:
    """Return a table with a line for each target: the goal, the measured ratio, and whether it is reached."""
    table = _table(["", "at most", "measured", ""])
    for verdict in verdicts:
        style = {"reached": "green", "NOT REACHED": "red"}.get(verdict.word)
        table.add_row(
            str(verdict.target), number(verdict.target.factor), number(verdict.ratio), verdict.word, style=style
        )
    return _titled("Targets", table)


def facts_line(facts: Mapping[str, str]) -> str:
    """Describe the machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _titled(title: str, table: Table) -> Group:
    return Group(Text(f"\n{title}", style="bold"), table)  # rich's own titles are no wider than their tables


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table
