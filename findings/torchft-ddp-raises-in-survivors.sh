#!/usr/bin/env bash
# torchft 0.2.0: where a peer has died, ``torchft.DistributedDataParallel`` raises in the backward pass of the survivors.
#
# ``Manager.allreduce`` gives a handle whose future is made when its ``wait()`` has succeeded. Over gloo, a peer's death
# makes that wait fail: it notes the error, returns False, and leaves the handle without a future. The communication
# hook of torchft's DDP does not look at the result, and takes the future: ``AssertionError``, without a message. So a
# program that trains through this DDP ends with the first worker that dies, although nothing of its own is wrong.
# Without DDP, by ``manager.allreduce(gradient).wait()``, the same program skips the step and goes on alone.
# Seen: one of two learners ends in their third step. With DDP the other raises AssertionError; without, it makes 3 more.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchft==0.2.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/learner.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

rank, way = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=lambda state: model.load_state_dict(state),
    state_dict=lambda: model.state_dict(),
    min_replica_size=1,
    replica_id=f"learner{rank}",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
optimizer = Optimizer(manager, inner)
called = DistributedDataParallel(manager, model) if way == "ddp" else model
raised, together, alone = "nothing", 0, 0
while alone < 3:
    first = manager.current_step()
    optimizer.zero_grad()
    loss = called(torch.ones(2, 3)).sum()
    manager.wait_quorum()
    together += manager.num_participants() == 2
    if together == 3 and rank == "1":
        os._exit(9)
    try:
        loss.backward()
    except Exception as error:
        raised = type(error).__name__
        break
    if way == "plain":
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
    optimizer.step()
    alone += together >= 3 and manager.num_participants() == 1 and manager.current_step() > first
print(f"{way}: the survivor's backward pass raised {raised}; it has made {alone} steps alone", flush=True)
os._exit(0)
PYTHON
cat > "$folder/pair.py" <<'PYTHON'
import os
import subprocess
import sys

from torchft.coordination import LighthouseServer

for way in ("ddp", "plain"):
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000)
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    learner = [sys.executable, "-W", "ignore", sys.argv[1]]
    other = subprocess.Popen([*learner, "1", way], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = subprocess.run([*learner, "0", way], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    assert other.wait() == 9, done.stderr[-2000:]
    seen = "raised AssertionError; it has made 0" if way == "ddp" else "raised nothing; it has made 3"
    assert seen in done.stdout, "this has changed"
    lighthouse.shutdown()
PYTHON
RUST_LOG=error "$folder/venv/bin/python" -W ignore "$folder/pair.py" "$folder/learner.py"
