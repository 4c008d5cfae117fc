"""Results: rows and their ratios, tables, curves, verdicts and the picture of a session."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import plot
from benchmarks.figures import Curve, Result, Row, curve_of, slope
from benchmarks.machine import facts
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


def test_the_picture_is_a_png(tmp_path, result):
    empty = Result("none", "Nothing ran", [Row("ours", note="failed")])
    other = Result("memory", "Memory", [Row("largest", [500.0]), Row("allowed", [450.0])], unit="MB")
    curves = [
        Curve("sizes", "Sizes", "bytes", "ms", {"ours": [(1e3, 0.5), (1e6, 2.0)]}),
        Curve("rounds", "Rounds", "round", "MB", {"server 0": [(0, 300.0), (9, 310.0)]}, logarithmic=False),
    ]
    path = tmp_path / "new" / "picture.png"
    plot.draw([result, empty, other], curves, facts(), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plot.draw([empty], [], facts(), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_row_is_its_median_and_its_best(result):
    assert (result.rows[0].median, result.rows[0].least) == (20.0, 10.0)


def test_ratios_are_of_medians_and_only_of_what_was_measured(result):
    assert result.ratio("ours", "mxnet") == 0.2
    assert result.ratio("ours", "gloo") is None
    assert result.ratio("nobody", "mxnet") is None


def test_the_record_has_samples_medians_and_ratios(result):
    rows = result.to_json()["rows"]
    assert rows[0]["samples"] == [30.0, 10.0, 20.0]
    assert rows[0]["median"] == 20.0
    assert rows[0]["ratios"] == {"mxnet": 0.2}
    assert "median" not in rows[2]
    assert rows[2]["note"] == "skipped: no gloo"


def test_a_curve_joins_the_medians_of_several_results():
    results = {8.0: Result("b", "", [Row("ours", [5.0])]), 1.0: Result("a", "", [Row("ours", [3.0]), Row("gloo")])}
    curve = curve_of("c", "A curve", "workers", results)
    assert curve.lines == {"ours": [(1.0, 3.0), (8.0, 5.0)]}
    assert curve.unit == "ms"


def test_slope():
    assert slope([(0, 1), (10, 21), (20, 41)]) == pytest.approx(2)
    assert slope([(0, 5), (10, 5)]) == 0
    assert slope([(3, 5)]) == slope([]) == slope([(3, 5), (3, 9)]) == 0
