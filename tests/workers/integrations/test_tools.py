"""The real tools of others in a real job, beside their own DDP over gloo in the same processes."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from page import ROOT, block
from scripts import lines_of, run

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
WORKER = dict[str, Any]  # what a worker has found with one of the tools


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def test_everything_is_as_under_their_own_ddp(tmp_path: Path) -> None:
    """In one job: each process with these packages costs five seconds."""
    for package in ("accelerate", "transformers", "lightning"):
        if find_spec(package) is None:  # to import them takes seconds
            pytest.skip(f"not installed: {package} (extras huggingface and lightning)")
    for path in HERE.glob("*_tools.py"):
        shutil.copy(path, tmp_path)
    shutil.copy(HERE / "tools_script.py", tmp_path / "train.py")
    (tmp_path / "page.py").write_text(block("KVStoreStrategy"))
    launch, *words = shlex.split(block("python -m workers.integrations"))
    done = run([sys.executable, str(ROOT / "launcher" / launch), *words], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    first, second = (json.loads(lines_of(done, rank)[-1]) for rank in range(2))
    # With two processes of loaders on each, of which one was forked, one spawned and one from a server of forks.
    assert (first["torch"], second["torch"]) == (8, 8)
    require_huggingface(first["huggingface"], second["huggingface"], tmp_path)
    # Rank 0 alone logs.
    assert sum("'eval_accuracy'" in line for line in lines_of(done, 0)) == 5
    assert not any("'eval_accuracy'" in line for line in lines_of(done, 1))
    require_lightning(first["lightning"], second["lightning"], tmp_path)


def require_huggingface(first: WORKER, second: WORKER, folder: Path) -> None:
    for each in (first, second):
        assert each["ours"] == each["theirs"]  # the same bits: two numbers have but one sum
        loop, trainer = each["ours"]
        loop_again, trainer_again = each["again"]  # from after the first of two epochs
        assert loop_again == loop
        assert without(trainer_again, "seen", "history") == without(trainer, "seen", "history")
        assert len(loop["norms"]) == 3
        assert loop["rate"] == [0.25]  # accelerate steps it once for each worker and update
        assert loop["evaluated"] == list(range(44))
        assert trainer["steps"] == 6  # of each five batches three steps; and early stopping has ended it
        (evaluated,) = (line for line in trainer["history"] if line.get("eval_samples") and line["epoch"] == 2)
        assert evaluated["eval_samples"] == 44
    for part in range(2):
        mine, other = first["ours"][part], second["ours"][part]
        assert (mine["rank"], other["rank"]) == ([0, 2, True], [1, 2, False])
        assert mine["weights"] == other["weights"]
        seen = mine["seen"] + other["seen"]
        assert (len(seen), set(seen)) == (50, set(range(44)))  # the last batches are filled up with the first samples
    # Rank 0 alone saves.
    assert [each["ours"][1]["saves"] for each in (first, second)] == [True, False]
    for name in ("ours", "theirs"):
        saved = sorted(path.name for path in (folder / name / "trainer").iterdir())
        assert saved == ["checkpoint-3", "checkpoint-6"]


def require_lightning(first: WORKER, second: WORKER, folder: Path) -> None:
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
        assert sorted(path.name for path in (folder / name / "saved").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        assert (folder / name / "metrics.csv").read_text().count("\n") == 5
