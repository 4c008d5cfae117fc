"""launch.py as sbatch runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from launched import ROOT
from programs_of_ours import run

from launcher.agents import boot


def test_the_description_of_a_job_is_executed_in_our_module(shadowed: Path) -> None:
    code, _, err = run(boot.run(sys.executable, "launcher.kinds.slurm_inside", str(ROOT)), shadowed)
    assert (code, err) == (2, "launch.py: the job on standard input cannot be read; only launch.py writes it\n")
