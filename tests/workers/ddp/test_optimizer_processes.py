"""DistributedOptimizer in two processes, beside torch's DistributedDataParallel in the same two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import workers

torch.set_num_threads(1)
rank, device = workers.init()
assert (rank, workers.size()) == (workers.local_rank(), workers.local_size()), "one host, in the order of ranks"
store_file = sys.argv[1]
torch.distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=workers.size())

def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(),
                         nn.Linear(64, 10))

def train(model, optimizer):
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(50):
        x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

ours, theirs = network(rank), network(0)  # broadcast_parameters gives all the first one's
workers.broadcast_parameters(ours)
before = [its.detach().clone() for its in theirs.parameters()]
assert all(torch.equal(*its) for its in zip(ours.parameters(), before))
optimizer = workers.DistributedOptimizer(torch.optim.Adam(ours.parameters(), lr=0.001), ours.named_parameters())
train(ours, optimizer)
train(DistributedDataParallel(theirs, broadcast_buffers=False), torch.optim.Adam(theirs.parameters(), lr=0.001))

def furthest(some):
    return max(float((one - two).detach().abs().max()) for one, two in zip(ours.parameters(), some))

print(json.dumps({"difference": furthest(theirs.parameters()), "way": furthest(before)}), flush=True)
torch.distributed.destroy_process_group()
workers.shutdown()
assert not workers.is_initialized()
"""


@pytest.mark.long
@pytest.mark.timeout(180)
def test_it_does_as_distributed_data_parallel(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = f"{sys.executable} {tmp_path}/script.py {tmp_path}/meeting"
    process = subprocess.run(
        [sys.executable, "-m", "launcher", "-n", "2", "-s", "1", "--launcher", "local", command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert process.returncode == 0, process.stdout
    found = [json.loads(line[line.index("{") :]) for line in process.stdout.splitlines() if '"difference"' in line]
    assert len(found) == 2, process.stdout
    for numbers in found:
        print(numbers)
        assert numbers["way"] > 1e-2
        assert numbers["difference"] <= 1e-5
