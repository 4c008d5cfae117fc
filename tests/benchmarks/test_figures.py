"""Rows, their ratios, and curves of them."""

from __future__ import annotations

import pytest

from benchmarks.figures import Result, Row, curve_of, slope


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
