"""The real Lightning in a real job, beside its own DDP over gloo in the same processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from page import block
from scripts import lines_of, run

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "lightning_script.py"


def test_everything_is_as_under_lightnings_own_ddp(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="not installed: lightning (extra lightning)")
    (tmp_path / "page.py").write_text(block("KVStoreStrategy"))
    launch = [sys.executable, "-m", "launcher", "-n", "2", "-s", "2", "--launcher", "local"]
    done = run([*launch, f"python {SCRIPT} {tmp_path}"])
    assert done.returncode == 0, done.stdout
    first, second = (json.loads(lines_of(done, rank)[-1]) for rank in range(2))
    for each in (first, second):
        ours, again, theirs = each["ours"], each["again"], each["theirs"]
        assert ours == theirs  # the same bits: two numbers have but one sum
        # Resumed after the first of two epochs.
        assert {**again, "seen": 0, "written": 0} == {**ours, "seen": 0, "written": 0}
        assert ours["steps"] == [6, 2]  # of each five batches three steps; and early stopping has ended it
        assert ours["rate"] == 0.5**4
        assert ours["metrics"]["summed"] == 44
    assert [each["ours"]["rank"] for each in (first, second)] == [[0, 2], [1, 2]]
    assert first["ours"]["metrics"] == second["ours"]["metrics"]
    # Each sample comes once, on one worker; and rank 0 alone saves.
    assert sorted(first["ours"]["seen"] + second["ours"]["seen"]) == list(range(44))
    assert [each["ours"]["written"] for each in (first, second)] == [2, 0]
    assert (first["page"], second["page"]) == (10, 10)
    for name in ("ours", "theirs"):
        assert sorted(path.name for path in (tmp_path / name / "saved").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        assert (tmp_path / name / "metrics.csv").read_text().count("\n") == 5
