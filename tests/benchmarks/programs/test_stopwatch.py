"""Rounds that are timed, and what is left of them for whoever started the program."""

from __future__ import annotations

import json

from benchmarks.programs import stopwatch
from benchmarks.programs.stopwatch import WARM_UP, measured, parser, report, timed


def test_rounds_are_timed_without_what_comes_before_them(monkeypatch):
    now = 0.0
    log = []

    class Clock:
        @staticmethod
        def perf_counter():
            return now

    def before():
        nonlocal now
        log.append("before")
        now += 100.0

    def one_round():
        nonlocal now
        log.append("round")
        now += 0.25

    monkeypatch.setattr(stopwatch, "time", Clock)
    assert timed(one_round, 2, before, warm_up=1) == [250.0, 250.0]
    assert log == ["before", "round"] * 3


def test_what_a_host_sends_is_counted_after_the_warm_up(monkeypatch, tmp_path):
    counter = tmp_path / "tx_bytes"
    rounds = 0

    def one_round():
        nonlocal rounds
        rounds += 1
        counter.write_text(f"{1000 if rounds <= WARM_UP else 1000 + 50 * (rounds - WARM_UP)}\n")

    monkeypatch.setattr(stopwatch, "SENT", counter)
    figures = measured(one_round, 4)
    assert len(figures["times"]) == 4
    assert figures["sent"] == 50
    counter.unlink()
    assert measured(lambda: None, 1)["sent"] == 0


def test_figures_are_left_as_json(tmp_path):
    args = parser().parse_args(["--report", str(tmp_path / "r"), "--rounds", "4"])
    report(args.report, times=[1.0], rank=args.rounds)
    assert json.loads((tmp_path / "r").read_text()) == {"times": [1.0], "rank": 4}
