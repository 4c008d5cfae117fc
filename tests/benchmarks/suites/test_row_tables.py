"""The suite of tables, with few rows."""

from __future__ import annotations

import pytest

from benchmarks.suites import row_tables
from benchmarks.targets import TARGETS, judge


def test_all_that_has_a_target_is_measured(session, monkeypatch):
    for name, value in {"KNOWN": 2_000, "SAVED": 500, "CAPACITY": 300, "PUSHED": 100, "TURNS": 2}.items():
        monkeypatch.setattr(row_tables, name, value)
    made = session("tables", "--rounds", "8")
    row_tables.tables(made)
    verdicts = judge(made.results)
    assert [verdict.target for verdict in verdicts] == [each for each in TARGETS if each.result.startswith("table-")]
    assert all(verdict.ratio is not None for verdict in verdicts)
    assert made.curves[0].lines["resident"][-1][0] == pytest.approx(8e-4)
