"""launch.py as sbatch runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched import ROOT
from programs_of_ours import run

from launcher.agents import boot


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A directory of a user who calls things as we do."""
    for name in ("launcher", "kvstore", "msgpack", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    return tmp_path


def test_the_description_of_a_job_is_executed_in_our_module(shadowed: Path) -> None:
    code, _, err = run(boot.run(sys.executable, "launcher.kinds.slurm_inside", str(ROOT)), shadowed)
    assert (code, err) == (2, "launch.py: the job on standard input cannot be read; only launch.py writes it\n")
