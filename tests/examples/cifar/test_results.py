"""Tables and pictures of results."""

from __future__ import annotations

import pytest
from cifar import results


def test_a_table_lines_up():
    rows = [{"codec": "a", "n": "10"}, {"codec": "long", "n": "5"}]
    assert results.table(rows) == "codec   n\na      10\nlong    5"


def test_rows_become_lines_for_a_spreadsheet(tmp_path):
    results.write_csv(tmp_path / "t.csv", [{"codec": "a", "n": 10}, {"codec": "b, c", "n": 5}])
    assert (tmp_path / "t.csv").read_text().splitlines() == ["codec,n", "a,10", '"b, c",5']


def test_a_missing_matplotlib_is_said(monkeypatch):
    results.require_plots()
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(results.PlotError, match="pip install matplotlib"):
        results.require_plots()


def test_a_figure_has_its_panels_and_needs_no_display(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    figure, axes = results.figure(2)
    assert len(axes) == 2
    figure.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
