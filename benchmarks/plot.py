"""A plot of results as bars and curves as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Curve, Result

WIDTH = 0.8  # of a group of bars
PANEL = (10.0, 4.5)  # inches
LEGEND = "upper left"  # fixed: matplotlib warns when its search for the best place takes a second


def draw(results: Sequence[Result], curves: Sequence[Curve], facts: Mapping[str, str], path: Path) -> None:
    """Write a PNG: a panel of bars for each unit, then a panel for each curve.

    Args:
        results: a group of bars each, with a bar for each row that has samples; on a logarithmic scale.
        curves: a panel each, with a line for each contender.
        facts: what to say about the machine.
        path: where the picture goes.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    groups: dict[str, list[Result]] = {}
    for result in results:
        if any(row.samples for row in result.rows):
            groups.setdefault(result.unit, []).append(result)
    panels = max(1, len(groups) + len(curves))
    figure, axes = pyplot.subplots(
        panels, 1, figsize=(PANEL[0], PANEL[1] * panels), squeeze=False, layout="constrained"
    )
    free = iter(axes[:, 0])
    for unit, same_unit in groups.items():
        _bars(next(free), same_unit, unit)
    for curve in curves:
        _lines(next(free), curve)
    said = ("cpu", "cores", "python", "torch", "pyzmq", "date")
    figure.supxlabel(", ".join(f"{name} {facts[name]}" for name in said if name in facts), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _bars(axes: Any, results: Sequence[Result], unit: str) -> None:
    names = list(dict.fromkeys(row.name for result in results for row in result.rows if row.samples))
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    labeled: set[str] = set()
    for group, result in enumerate(results):
        rows = [row for row in result.rows if row.samples]
        width = WIDTH / len(rows)
        for place, row in enumerate(rows):
            label = None if row.name in labeled else row.name
            labeled.add(row.name)
            left = group + (place - (len(rows) - 1) / 2) * width
            bars = axes.bar(left, max(row.median, 1e-3), width, color=colors[row.name], label=label)
            axes.bar_label(bars, labels=[f"{row.median:.3g}"], fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.set_xticks(range(len(results)), [result.name for result in results], rotation=20, ha="right", fontsize=8)
    axes.legend(loc=LEGEND, fontsize=7, ncols=3)
    axes.margins(y=0.15)


def _lines(axes: Any, curve: Curve) -> None:
    for name, line in curve.lines.items():
        axes.plot([x for x, _ in line], [y for _, y in line], marker="o", markersize=3, label=name)
    if curve.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(curve.along)
    axes.set_ylabel(curve.unit)
    axes.set_title(curve.title, fontsize=9)
    axes.grid(alpha=0.3)
    if curve.lines:
        axes.legend(loc=LEGEND, fontsize=7)
