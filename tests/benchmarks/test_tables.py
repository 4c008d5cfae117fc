"""Tables of results, curves and verdicts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.figures import Curve
from benchmarks.tables import curve_table, number, result_table, verdict_table
from benchmarks.targets import Target, judge


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_a_table_has_a_line_for_each_contender_and_a_column_for_each_peer_that_ran(result):
    text = shown(result_table(result))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["ours"] == ["ours", "20.0", "10.0", "0.200"]
    assert "÷ mxnet" in text
    assert "÷ gloo" not in text
    assert lines["gloo"] == ["gloo", "skipped:", "no", "gloo"]


def test_a_curves_table_has_a_line_for_each_choice():
    curve = Curve("c", "A curve", "bytes", "ms", {"ours": [(1000, 0.5), (1e6, 2.25)], "gloo": [(1e6, 3.0)]})
    lines = [line.split() for line in shown(curve_table(curve)).splitlines()]
    assert ["1,000", "0.500"] in lines
    assert ["1,000,000", "2.25", "3.00"] in lines


def test_the_verdicts_table_says_which_targets_are_reached(result):
    targets = [
        Target("work", "ours", "mxnet", 1 / 4),
        Target("work", "ours", "mxnet", 1 / 6),
        Target("work", "ours", "gloo", 1.0),
    ]
    lines = [line.strip() for line in shown(verdict_table(judge([result], targets))).splitlines()]
    words = [line.split("  ")[-1].strip() for line in lines if line.startswith("work: ours")]
    assert words == ["reached", "NOT REACHED", "not measured"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_numbers_have_the_digits_that_mean_something(value, text):
    assert number(value) == text
