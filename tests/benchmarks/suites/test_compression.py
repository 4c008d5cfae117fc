"""Codecs are measured alone; where hosts cannot be made, it says so."""

from __future__ import annotations

import pytest

from benchmarks.jobs import Unavailable
from benchmarks.suites import compression


def test_codecs_are_measured_where_hosts_cannot_be_made(session, monkeypatch):
    def refuse():
        raise Unavailable("no root here")

    monkeypatch.setattr(compression, "ELEMENTS", 20_000)
    monkeypatch.setattr(compression, "TURNS", 1)
    monkeypatch.setattr(compression, "require", refuse)
    made = session("compression")
    compression.compression(made)
    assert [result.name for result in made.results] == ["codecs-encode", "codecs-decode"]
    for result in made.results:
        assert [row.name for row in result.rows] == [compression.FLOOR, *compression.CODECS]
        assert result.row(compression.FLOOR).median == pytest.approx(0.08), "ms for 20,000 floats at 1 GB/s"
    assert "hosts skipped: no root here" in made.console.file.getvalue()
