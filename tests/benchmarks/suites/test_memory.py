"""How much memory servers may hold, and whether it grows."""

from __future__ import annotations

import pytest

from benchmarks.contenders import Work
from benchmarks.suites.memory import allowed_mb, growth, series, summary


def test_allowed_are_weights_a_rounds_gradients_and_what_python_needs():
    assert allowed_mb(Work("100MB", workers=2, servers=2)) == pytest.approx(50 + 2 * 50 + 300)


def sampled(*totals: tuple[float, float]):
    return [(10 * number, [{"all": each, "own": 1.0} for each in pair]) for number, pair in enumerate(totals)]


def test_the_series_has_a_line_for_each_server_and_kind():
    curve = series(sampled((400.0, 390.0), (410.0, 390.0)))
    assert curve.lines["server 0"] == [(0, 400.0), (10, 410.0)]
    assert set(curve.lines) == {"server 0", "server 0, own", "server 1", "server 1, own"}


def test_the_summary_has_the_most_and_what_it_grew_by_once_it_was_warm():
    held = [(100, 100), (390, 300), (400, 300), (400, 301), (401, 300), (402, 300), (402, 300)]
    most, grown = summary(sampled(*held), allowed=350.0)
    assert most.ratio("largest server", "allowed") == pytest.approx(402 / 350)
    assert grown.row("largest growth").median == pytest.approx(402 - 400.5)
    assert grown.row("largest growth").note == "slope: +70.00, -30.00 KB a round"


def test_one_odd_sample_is_no_growth():
    assert growth([100, 200, 300, 300, 300, 300, 300, 300, 900]) == 0
    assert growth([100.0]) == 0
