"""The same training by ssh and every manager, with real servers: the weights have the bits of a local job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT
from sites import KINDS, place

# Whole trainings, while other tests run beside them.
pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster, pytest.mark.release]

TRAIN = """
import hashlib
import torch
import kvstore as kv
from workers import Trainer

store = kv.create("dist_sync")
torch.manual_seed(store.rank)
data, target = torch.randn(64, 20), torch.randn(64, 5)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
trainer = Trainer(model.named_parameters(), "adam", {"lr": 0.01}, kvstore=store)
for _ in range(5):
    model.zero_grad()
    torch.nn.functional.mse_loss(model(data), target).backward()
    trainer.step()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("WEIGHTS", len(state), hashlib.sha256(state).hexdigest(), flush=True)
store.close()
"""


@pytest.fixture(scope="module")
def weights() -> str:
    """What the training ends in as a job on this machine."""
    words = [sys.executable, "-m", "launcher", "-n", "2", "-s", "1", "python", "-c", TRAIN]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return _weights(subprocess.check_output(words, env=env, text=True, stderr=subprocess.DEVNULL))


def _weights(out: str) -> str:
    found = {line.partition("WEIGHTS ")[2] for line in out.splitlines() if "WEIGHTS" in line}
    assert len(found) == 1, out
    return found.pop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_same_to_the_bit(
    kind: str, weights: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with place(kind, request, tmp_path) as site:
        words = ("-n", "2", "-s", "1", "--env", "OMP_NUM_THREADS", "python", "-c", TRAIN)
        run = site.launch(*words, real=True, env={"OMP_NUM_THREADS": "1"})
        assert run.wait(150) == 0, run.err
        assert run.out.count("WEIGHTS") == 2
        assert _weights(run.out) == weights
        assert "worker" not in run.err, run.err
