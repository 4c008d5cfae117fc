"""Training whose workers are killed: what is run, and what comes of its notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suites import deaths as module
from benchmarks.suites.deaths import WAYS, deaths


def noted(monkeypatch, lost: int) -> list[str]:
    """Let each of four workers note eight samples a second.

    Where workers are killed, the last one comes back after some seconds; the first has a step of three seconds then.
    """
    commands = []

    def run(members, path: Path, timeout_s: float):
        (member,) = members
        commands.append(" ".join(member.argv))
        killed = "--inject" in member.argv or ("--kills" in member.argv and "--kills 0" not in commands[-1])
        for rank in range(4):
            times = dict.fromkeys(range(100), 8) | {-1: 0}
            if killed and rank == 3:
                times = {at: count for at, count in times.items() if not 20 < at <= 20 + lost} | {19.5 + lost: 0}
            if killed and rank == 0:
                del times[21], times[22]
            lines = [f"{1000 + at} {count}\n" for at, count in sorted(times.items())]
            (path.parent / f"samples-{rank}").write_text("".join(lines))
        return {"loss": 2.02 if killed else 2.0}

    monkeypatch.setattr(module, "run", run)
    return commands


def test_samples_losses_and_pauses_are_compared_with_those_of_an_undisturbed_job(session, monkeypatch):
    commands = noted(monkeypatch, lost=38)
    monkeypatch.setattr("benchmarks.peers.Peers.torchft", lambda self: "python-of-torchft")
    made = session("deaths", "--rounds", "100", "--peers", "torchft")
    deaths(made)
    results = {result.name: result for result in made.results}
    assert results["deaths-sync"].row("kvstore").median == pytest.approx(0.9)
    assert results["deaths-sync"].ratio("torchft", "wanted") == pytest.approx(1.0)
    assert results["deaths-diloco-loss"].ratio("killed", "undisturbed") == pytest.approx(1.01)
    assert results["deaths-sync-pause"].row("kvstore").samples == pytest.approx([2900.0]), "of steps of 100 ms"
    assert results["deaths-resnet8-pause"].row("kvstore").samples == pytest.approx([2750.0])
    assert "deaths-diloco-pause" not in results, "a round has many steps"
    assert json.dumps([result.to_json() for result in made.results])
    sync = commands[1]
    assert "kill:worker:0@15s" in sync
    assert "kill:worker:1@25s" in sync
    assert "python-of-torchft -m benchmarks.programs.torchft_job --workers 4 --kills 9" in commands[3]


def test_workers_are_killed_in_turn_and_the_last_one_has_time_to_come_back():
    assert WAYS["sync"].kills(120) == 11
    assert WAYS["diloco"].kills(120) == 5
