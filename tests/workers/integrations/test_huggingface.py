"""The real accelerate and transformers in a real job, beside their own DDP over gloo in the same processes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from page import ROOT, block
from scripts import lines_of, run

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "huggingface_script.py"


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def test_everything_is_as_under_their_own_ddp(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="not installed: accelerate (extra huggingface)")
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    launch, *words = shlex.split(block("python -m workers.integrations"))
    done = run([sys.executable, str(ROOT / "launcher" / launch), *words], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    first, second = (json.loads(lines_of(done, rank)[-1]) for rank in range(2))
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
    # Rank 0 alone saves and logs.
    assert [each["ours"][1]["saves"] for each in (first, second)] == [True, False]
    assert sum("'eval_accuracy'" in line for line in lines_of(done, 0)) == 5
    assert not any("'eval_accuracy'" in line for line in lines_of(done, 1))
    for name in ("ours", "theirs"):
        saved = sorted(path.name for path in (tmp_path / name / "trainer").iterdir())
        assert saved == ["checkpoint-3", "checkpoint-6"]
