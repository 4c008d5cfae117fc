"""The same training by ssh and every manager, with real servers: the weights have the bits of a local job."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from sites import KINDS, place
from threaded import ThreadedJob

from kvstore.client import DistStore

# Whole trainings, while other tests run beside them.
pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster, pytest.mark.release]

MODEL = """
import torch
torch.manual_seed(store.rank)
data, target = torch.randn(64, 20), torch.randn(64, 5)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
"""
STEPS = """
from workers import Trainer
trainer = Trainer(model.named_parameters(), "adam", {"lr": 0.01}, kvstore=store)
for _ in range(5):
    model.zero_grad()
    torch.nn.functional.mse_loss(model(data), target).backward()
    trainer.step()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
"""
TRAIN = f"""
import hashlib
import kvstore as kv

store = kv.create("dist_sync")
{MODEL}{STEPS}
print("WEIGHTS", len(state), hashlib.sha256(state).hexdigest(), flush=True)
store.close()
"""


@pytest.fixture(scope="module")
def weights() -> str:
    """What the training ends in within this process."""
    one_at_a_time = threading.Lock()  # who draws numbers

    def train(store: DistStore) -> bytes:
        scope: dict[str, Any] = {"store": store}
        with one_at_a_time:
            exec(MODEL, scope)
        exec(STEPS, scope)
        state: bytes = scope["state"]
        return state

    with ThreadedJob(2, 1) as job:
        (state,) = set(job.run(train))
    return f"{len(state)} {hashlib.sha256(state).hexdigest()}"


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
