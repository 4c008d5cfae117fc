#!/usr/bin/env python3
"""Federated averaging (McMahan et al., arXiv:1602.05629) of clients that have few pictures or many, as a DiLoCo.

    launch.py -n 3 -s 1 "python federated_averaging.py"
    launch.py -n 3 -s 1 "python federated_averaging.py --quorum 2 --grace 0.05 --slow-factor 3"

Each worker is a client with handwritten digits of its own, which it shows to nobody: client k has k + 1 parts of them,
and mostly some of the ten digits. In a round, a client trains once on all its pictures, and sends how its weights have
changed. The servers take the mean over clients by their numbers of pictures. That is DiLoCo with one fragment and no
outer momentum.

With a quorum, a round does without clients that are late: their changes count in the next one.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence

import torch
from arguments import Parser, default_store, natural, positive
from digits.pictures import SHADES, Pictures, read
from torch import Tensor, nn
from torch.nn import functional

import kvstore as kv
from workers import DiLoCo

MEAN = {"outer_optimizer": "sgd", "outer_params": {"learning_rate": 1.0}}  # the outer step is the mean of the changes


def main() -> None:
    args = parse()
    try:
        train(args)
    except kv.KVStoreError as exc:
        sys.exit(f"federated_averaging.py: error: {exc}")


def train(args: Namespace) -> None:
    """One client's part, and what it prints if it is the first one."""
    torch.set_num_threads(1)  # the network is so small that threads would only wait for each other
    clients = kv.create(default_store())  # says which client this is; the weights have a store of their own
    rank, last = clients.rank, clients.num_workers - 1
    training, validation = (tensors(pictures) for pictures in read())
    inputs, labels = (part[mine(training[1], rank, clients.num_workers)] for part in training)

    torch.manual_seed(args.seed + rank)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    options = {"quorum": args.quorum, "grace": args.grace} if args.quorum else {}
    federated = DiLoCo(model, optimizer, "auto", args.local_steps, weight="samples", **MEAN, **options)
    pace = args.step_time * (args.slow_factor if rank == last else 1.0)
    print(f"client {rank} of {last + 1}: {len(labels)} pictures, {args.local_steps} batches a round")

    clients.barrier()
    began = time.perf_counter()
    for number in range(1, args.rounds + 1):
        for chosen in torch.randperm(len(labels)).tensor_split(args.local_steps):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            time.sleep(pace)
            federated.step(samples=len(chosen))
        if rank == 0 and number % args.report == 0:
            print(f"round {number}: accuracy {accuracy(model, *validation):.3f}")
    took = time.perf_counter() - began
    federated.finish()
    print(
        f"client {rank}: {args.rounds} rounds in {took:.1f} s; at the end, accuracy {accuracy(model, *validation):.3f}"
    )


def mine(labels: Tensor, rank: int, clients: int) -> Tensor:
    """Return which pictures client `rank` has: the more, the higher its rank, and half of them of the same few digits.

    All clients draw the same, so each picture is one client's.
    """
    draws = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=draws)
    mixed, sorted_ = order[::2], order[1::2][labels[order[1::2]].argsort()]
    sizes = torch.arange(1, clients + 1, dtype=torch.float64)
    ends = [(sizes.cumsum(0) / sizes.sum() * len(part)).round().long()[:-1] for part in (mixed, sorted_)]
    parts = [part.tensor_split(end) for part, end in zip((mixed, sorted_), ends, strict=True)]
    return torch.cat([part[rank] for part in parts])


def tensors(pictures: Pictures) -> tuple[Tensor, Tensor]:
    """Return pictures as input of the network, and which digits they show."""
    return torch.from_numpy(pictures.images).float().flatten(1) / SHADES, torch.from_numpy(pictures.labels)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the fraction of pictures that the model classifies correctly."""
    return float((model(inputs).argmax(1) == labels).float().mean())


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Federated averaging of clients with different numbers of handwritten digits")
    parser.add_argument("--rounds", type=positive, default=30, help="how many rounds each client takes part in")
    parser.add_argument("--local-steps", type=positive, default=10, help="batches of a client in a round")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate of the clients")
    parser.add_argument("--quorum", type=natural, default=0, help="how many clients a round needs; 0 for all")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds that a round with its quorum waits at most")
    parser.add_argument("--slow-factor", type=float, default=1.0, help="how many times slower the last client is")
    parser.add_argument("--step-time", type=float, default=0.005, help="seconds that a batch takes longer than here")
    parser.add_argument("--report", type=positive, default=10, help="print the accuracy after so many rounds")
    parser.add_argument("--seed", type=natural, default=0, help="of the first weights and of the batches")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
