"""One process's training steps: alone, with our ``Trainer``, or with torch's DDP, over gloo or over us."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.models import MODELS, build, pictures
from benchmarks.programs.stopwatch import parser, report, timed

SGD = {"lr": 0.01, "momentum": 0.9}
BATCHES = 4
WARM_UP = 13  # Trainer watches ten steps before it pushes gradients during backward

Batch = tuple[torch.Tensor, torch.Tensor]


def alone(model: nn.Module) -> tuple[Callable[[Batch], None], int]:
    """Return the step of a single process, and the rank."""
    return _plain(model, model), 0


def ddp(model: nn.Module, meet: str) -> tuple[Callable[[Batch], None], int]:
    """Return the step with gradients averaged by gloo, and the rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    return _plain(nn.parallel.DistributedDataParallel(model), model), rank


def group(model: nn.Module) -> tuple[Callable[[Batch], None], int]:
    """Return the step of the same program with gradients summed by our process group, and the rank."""
    from workers.integrations import torch_distributed

    rank = torch_distributed.init().rank
    return _plain(nn.parallel.DistributedDataParallel(model), model), rank


def ours(model: nn.Module, forward: bool) -> tuple[Callable[[Batch], None], int]:
    """Return the step with sums and updates on the servers, and the rank; with ``forward``, modules wait for values."""
    import kvstore as kv
    from workers import Trainer

    store = kv.create("dist_sync")
    trainer = Trainer(
        model.named_parameters(),
        "sgd",
        {"learning_rate": SGD["lr"], "momentum": SGD["momentum"]},
        kvstore=store,
        wait_in_forward=model if forward else None,
    )

    def step(batch: Batch) -> None:
        images, labels = batch
        trainer.zero_grad()
        cross_entropy(model(images), labels).backward()
        trainer.step()

    return step, store.rank


def _plain(called: nn.Module, model: nn.Module) -> Callable[[Batch], None]:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step(batch: Batch) -> None:
        images, labels = batch
        optimizer.zero_grad()
        cross_entropy(called(images), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Measure; rank 0 reports. The process alone also times its forward pass, during which nothing can be sent."""
    options = parser()
    options.add_argument("--who", choices=["alone", "ours", "forward", "group", "ddp"], required=True)
    options.add_argument("--model", choices=sorted(MODELS), default="resnet8")
    options.add_argument("--meet", default="", help="the file through which the processes of ddp find each other")
    args = options.parse_args()

    model = build(args.model)
    if args.who == "ddp":
        step, rank = ddp(model, args.meet)
    elif args.who == "group":
        step, rank = group(model)
    else:
        step, rank = alone(model) if args.who == "alone" else ours(model, args.who == "forward")
    batches = [pictures(BATCHES * rank + number) for number in range(BATCHES)]
    turn = 0

    def one_round() -> None:
        nonlocal turn
        step(batches[turn % BATCHES])
        turn += 1

    times = timed(one_round, args.rounds, warm_up=WARM_UP)
    forward = timed(lambda: model(batches[0][0]), args.rounds) if args.who == "alone" else []
    if rank == 0:
        report(args.report, times=times, forward=forward)
    if args.who in ("group", "ddp"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
