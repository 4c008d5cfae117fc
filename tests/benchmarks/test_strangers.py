"""What strangers cost: rounds a second with each kind, beside those with nobody."""

from __future__ import annotations

import sys

from benchmarks import strangers
from benchmarks.programs.stranger import KINDS


def test_each_kind_is_compared_with_nobody(monkeypatch, capsys):
    def pretend(kind, net, rounds):
        assert (net, rounds) == ("1MB", 5)
        return (200.0, {}) if kind == strangers.NOBODY else (50.0, {"cpu": 0.9})

    monkeypatch.setattr(strangers, "rounds_a_second", pretend)
    monkeypatch.setattr(sys, "argv", ["strangers", "--net", "1MB", "--rounds", "5", "--repeats", "1"])
    strangers.main()
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["nobody", "200.0", "rounds/s,", "100%"]
    assert [line.split()[0] for line in others] == list(KINDS)
    assert all(line.endswith("25%, cpu 0.9") for line in others)
