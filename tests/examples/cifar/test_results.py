"""Tables and pictures of results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cifar import results
from cifar.lines import Monitor
from cifar.lines import test_io as read_alone


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


# ---- Lines of other programs


def test_reading_alone_prints_how_fast_it_is(dataset, capsys):
    read_alone([None] * 5, 10, 2)
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        "Batch [1]",
        "Batch [3]",
        "read 5 batches of 10 pictures in 0.0 s",
    ]


def test_the_monitor_prints_the_size_of_every_parameter_on_rank_0(capsys):
    monitor = Monitor(2)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    torch.nn.init.constant_(model.bias, -0.5)
    for _ in range(3):
        monitor(SimpleNamespace(locals={"model": model}, rank=0))
        Monitor(1)(SimpleNamespace(locals={"model": model}, rank=1))
    sizes = [("weight", "3"), ("bias", "0.5")]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["Batch:", n, *size] for n in ("0", "2") for size in sizes
    ]
