"""The work of ``learner`` by torchft: a lighthouse, and learners which a parent kills and starts again.

Each learner is a replica group of its own, as one host with one accelerator is. The time-outs are torchft's defaults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks.programs import learner
from benchmarks.programs.stopwatch import report

POLL_S = 0.02
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


def main() -> None:
    """Run the job, or be one of its learners."""
    options = learner.parser()
    options.add_argument("--workers", type=int, required=True)
    options.add_argument("--kills", type=int, default=0)
    options.add_argument("--first-s", type=float, default=0.0, help="from the start to the first kill")
    options.add_argument("--every-s", type=float, default=0.0, help="from one kill to the next")
    args = options.parse_args()
    if LIGHTHOUSE in os.environ:
        learn(args, int(os.environ["REPLICA"]))
    else:
        sys.exit(lead(args))


def lead(args: Any) -> int:
    """Run the job; return the exit code of the first learner that fails by itself."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    environ = {**os.environ, LIGHTHOUSE: lighthouse.address()}

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.programs.torchft_job", *sys.argv[1:]]
        return subprocess.Popen(command, env={**environ, "REPLICA": str(rank)})

    learners = [start(rank) for rank in range(args.workers)]
    began, killed = time.monotonic(), 0
    try:
        while any(each.poll() is None for each in learners):
            if killed < args.kills and time.monotonic() - began >= args.first_s + killed * args.every_s:
                learners[killed % args.workers].kill()
                killed += 1
            for rank, each in enumerate(learners):
                if each.poll() == -signal.SIGKILL:
                    learners[rank] = start(rank)
                elif each.returncode:
                    return each.returncode
            time.sleep(POLL_S)
    finally:
        for each in learners:
            each.kill()
        lighthouse.shutdown()
    return 0


def learn(args: Any, rank: int) -> None:
    """Make as many steps as the time has; note each that was committed."""
    work = learner.prepare(args.work)
    inner = torch.optim.AdamW(work.module.parameters(), lr=work.lr)

    def load(state: dict[str, Any]) -> None:
        work.module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": work.module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"learner{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    optimizer = Optimizer(manager, inner)
    parameters = list(work.module.parameters())
    steps = args.seconds / args.step_s
    with learner.notes(args.folder, rank) as note:
        while manager.current_step() < steps:
            step = manager.current_step()
            optimizer.zero_grad()
            learner.backward(work.module, work.batch(rank, step), args.step_s)
            # Not through torchft's DDP: where a peer has died, its backward pass raises an AssertionError.
            mean = parameters_to_vector([each.grad for each in parameters])
            manager.allreduce(mean).wait()
            vector_to_parameters(mean, [each.grad for each in parameters])
            optimizer.step()
            if manager.current_step() > step:
                note(learner.BATCH)
    if manager.participating_rank() == 0:
        report(args.report, loss=learner.held_out_loss(work))
    manager.shutdown()


if __name__ == "__main__":
    main()
