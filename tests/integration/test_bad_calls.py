"""What a user reads who has made a mistake in one worker: one root cause, last, with their own line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from jobs import job

SCRIPT = """
    import sys
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync", check_finite=True)
    weight = np.ones((4, 3), np.float32)
    store.init("weight", weight)

    def step(number):
        gradient = np.ones_like(weight)
        if number == 2 and store.rank == 1:
            gradient = wrong(gradient)
        store.pushpull("weight", gradient, out=weight)

    def wrong(gradient):
        print("about to fail", flush=True)
        {mistake}

    for number in range(9):
        step(number)
    """
SHAPE, OWN, NAN = "return gradient.T", "1 / 0", "return gradient * np.nan"
MISMATCH = "kvstore.errors.Mismatch: key 'weight' is float32[4, 3], but this call has float32[3, 4]"


def fail(tmp_path: Path, mistake: str, *, servers: int = 1, verbose: bool = False) -> list[str]:
    """What launch.py prints for a job of two workers; both of its streams."""
    script = textwrap.dedent(SCRIPT).format(mistake=mistake)
    with job(tmp_path, script, servers=servers, KVSTORE_VERBOSE=f"{verbose:d}") as running:
        assert running.wait() == 1, running.output
        assert not running.members()
    return running.output.splitlines()


@pytest.mark.release
def test_one_root_cause_last_with_the_users_own_line(tmp_path: Path) -> None:
    lines = fail(tmp_path, SHAPE, servers=2)
    script = tmp_path / "script.py"
    assert len(lines) <= 12, lines
    assert lines[:2] == ["launch.py: starting 2 workers, 2 servers on this machine", "[worker 1] about to fail"]
    assert lines[2] == f"launch.py: worker 0 ended because worker 1 has failed (at {script}:14, in step)"
    assert lines[3] == "launch.py: worker 1 exited with code 1:"
    assert lines[4].startswith("[worker 1] Traceback (most recent call last; ")
    assert lines[4].endswith("--verbose shows all):")
    assert lines[5:] == [
        f'[worker 1]   File "{script}", line 21, in <module>',
        "[worker 1]     step(number)",
        f'[worker 1]   File "{script}", line 14, in step',
        '[worker 1]     store.pushpull("weight", gradient, out=weight)',
        f"[worker 1] {MISMATCH}",
    ]


@pytest.mark.release
@pytest.mark.parametrize(
    ("mistake", "last"),
    [
        (OWN, "ZeroDivisionError: division by zero"),
        (NAN, "kvstore.errors.NotFinite: push 3 of 'weight' by worker 1 has NaN or infinite elements; "),
    ],
)
def test_whoever_has_made_it_is_named(tmp_path: Path, mistake: str, last: str) -> None:
    lines = fail(tmp_path, mistake)
    assert len(lines) <= 13, lines  # one is the script's own
    assert lines[-1].startswith(f"[worker 1] {last}")
    assert [line for line in lines if line.startswith("launch.py: worker 0 ")]


@pytest.mark.release
def test_verbose_shows_everything_at_once(tmp_path: Path) -> None:
    lines = fail(tmp_path, SHAPE, verbose=True)
    for rank in (0, 1):
        assert lines.count(f"[worker {rank}] Traceback (most recent call last):") == 1
        assert any(line.startswith(f"[worker {rank}]   File ") and "/kvstore/" in line for line in lines)
    assert f"[server 0] server 0 ends: worker 1 failed: {MISMATCH}" in lines
    assert f"[scheduler] the job has failed: worker 1 failed: {MISMATCH}" in lines
    assert lines[-1] == f"launch.py: worker 1 exited with code 1: {MISMATCH} (at {tmp_path / 'script.py'}:14, in step)"
