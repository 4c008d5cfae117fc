"""``python -m faults.few``: the runs of CI, one of each kind. One process makes all, so that torch is imported once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from faults import checkpoints, killing, launched, losing
from faults.killing import Kills
from faults.plan import Plan
from faults.runs import carry_out

KILLS = 2


def disturbed() -> str:
    """Return what is wrong with a run whose connections are cut, and whose processes are stopped and killed."""
    plan = replace(Plan.of(0, "curve"), rounds=50)
    outcome = carry_out(plan)
    assert plan.faults, "this seed does nothing"
    right = ("exact", "loud") if plan.kills else ("exact",)
    return "" if outcome.verdict in right else f"{outcome.verdict}: {outcome.why}\n{outcome.output}"


def lost(kind: str, mode: str) -> str:
    result = losing.carry_out(0, kind, mode, kills=KILLS)
    return result.wrong or ("" if len(result.kills) == KILLS else "not all were killed")


def returned() -> str:
    result = losing.carry_out(0, "shm", "sync", kills=KILLS, returns=True)
    return result.wrong or ("" if len(result.kills) == KILLS and result.returns else "nobody has come back")


def moved() -> str:
    kills = Kills(1, "shm", "rows", KILLS, move=True)
    result = launched.carry_out(kills, pause_s=0.05)
    if result.wrong:
        return f"{result.wrong}\n{result.output}"
    if result.output.count("is moved;") != KILLS or "takeovers=0" in result.output:
        return f"no standby has taken over\n{result.output}"
    same = killing.undisturbed(kills, result.rounds) == result.bits
    return "" if same else "other bits than in the undisturbed run"


def checkpointed() -> str:
    with tempfile.TemporaryDirectory() as directory:
        checkpoints.kill(Path(directory), 6, 0)  # raises if one is torn
    return ""


RUNS: dict[str, Callable[[], str]] = {
    "curve, disturbed": disturbed,
    "shm sync, workers killed": lambda: lost("shm", "sync"),
    "curve rows-async, workers killed": lambda: lost("curve", "rows-async"),
    "shm sync, workers killed and started again": returned,
    "shm rows, servers moved": moved,
    "checkpoints, killed": checkpointed,
}


def main() -> int:
    wrong = 0
    for name, run in RUNS.items():
        said = run()
        wrong += bool(said)
        print(f"{name}: {said or 'right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
