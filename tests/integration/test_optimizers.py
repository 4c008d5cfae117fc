"""Other optimizers in a real job: the servers' operator allows them, and a worker cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job

MODULE = """
from pathlib import Path

import torch

with open(Path(__file__).with_suffix(".imported"), "a") as file:
    print("x", file=file)


class Half(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] / 2 * param.grad
"""

SCRIPT = """
import os
import sys

import torch

import kvstore as kv

store = kv.create("dist_sync")
store.init("w", torch.zeros(3))

os.environ["KVSTORE_OPTIMIZERS"] += ", sneaky=sneaky:Half"
try:
    store.set_optimizer("sneaky")
except kv.UnknownName as exc:
    print("REFUSED:", exc)

store.set_optimizer("half", learning_rate=1.0)
store.push("w", torch.ones(3))
store.pull("w", out := torch.zeros(3))
print("GOT", out.tolist())
"""


@pytest.mark.release
def test_the_servers_operator_decides(tmp_path: Path) -> None:
    for name in ("good", "sneaky"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    with job(
        tmp_path, SCRIPT, workers=1, servers=1, KVSTORE_OPTIMIZERS="good:Half", PYTHONPATH=str(tmp_path)
    ) as running:
        assert running.wait() == 0, running.output
    assert "REFUSED: server 0: no optimizer 'sneaky'; choose from " in running.output
    assert "KVSTORE_OPTIMIZERS allows others" in running.output
    assert "GOT [-0.5, -0.5, -0.5]" in running.output
    assert (tmp_path / "good.imported").read_text() == "x\nx\n", "by the worker and by the server"
    assert (tmp_path / "sneaky.imported").read_text() == "x\n", "by the worker alone"
