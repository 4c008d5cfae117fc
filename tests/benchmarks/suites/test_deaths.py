"""Training whose workers are killed: what is run, and what comes of its notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suites import deaths as module
from benchmarks.suites.deaths import Learners, deaths


def noted(monkeypatch, lost: int) -> list[str]:
    """Let each of four workers note eight samples a second; one lacks some where workers are killed."""
    commands = []

    def run(members, path: Path, timeout_s: float):
        (member,) = members
        commands.append(" ".join(member.argv))
        killed = "--inject" in member.argv
        for rank in range(4):
            times = range(100 - lost if killed and rank == 3 else 100)
            lines = [f"{1000 + at} 8\n" for at in times]
            (path.parent / f"samples-{rank}").write_text("".join(lines))
        return {"loss": 2.02 if killed else 2.0}

    monkeypatch.setattr(module, "run", run)
    return commands


def test_samples_and_losses_are_compared_with_those_of_an_undisturbed_job(session, monkeypatch):
    commands = noted(monkeypatch, lost=40)
    made = session("deaths", "--rounds", "100")
    deaths(made)
    results = {result.name: result for result in made.results}
    assert results["deaths-sync"].row("kvstore").median == pytest.approx(0.9)
    assert results["deaths-sync"].ratio("kvstore", "wanted") == pytest.approx(1.0)
    assert results["deaths-diloco-loss"].ratio("killed", "undisturbed") == pytest.approx(1.01)
    assert json.dumps([result.to_json() for result in made.results])
    sync = commands[1]
    assert "kill:worker:0@15s" in sync
    assert "kill:worker:1@25s" in sync


def test_workers_are_killed_in_turn_and_the_last_one_has_time_to_come_back():
    assert Learners("sync", 120, 10.0).kills == 11
    assert Learners("diloco", 120, 20.0).kills == 5
    assert Learners("sync", 120).kills == 0
