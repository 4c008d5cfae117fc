"""The task in examples/skypilot: its command, with the variables that SkyPilot sets on each node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import ROOT

FILE = ROOT / "examples" / "skypilot" / "train.yaml"


def task() -> dict[str, Any]:
    loaded = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_secret_is_not_in_the_file_and_the_program_is_in_the_clone() -> None:
    described = task()
    assert described["secrets"] == {"KVSTORE_JOB_SECRET": None}
    assert (described["num_nodes"], described["workdir"]) == (2, ".")
    (program,) = (word for word in described["run"].split() if word.endswith(".py"))
    assert (ROOT / program).is_file()


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_is_told_where_the_nodes_meet_and_which_one_this_is(rank: int, tmp_path: Path) -> None:
    """How workers fare that torchrun has started so, tests/integration/test_started_elsewhere.py shows."""
    from torch.distributed.run import config_from_args, parse_args

    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank)}
    environ |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    words = subprocess.check_output(["/bin/bash", "-c", task()["run"]], env=environ, text=True).splitlines()
    config, _, arguments = config_from_args(parse_args(words))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs["rank"]) == (
        "static",
        "10.0.0.1:29500",
        rank,
    )
    assert arguments[-3:] == ["examples/train_lm.py", "--steps", "200"]
