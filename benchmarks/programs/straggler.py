"""A worker whose rounds take little work, and 50 ms more from a moment on, if it is told so: in its input or backward.

All that takes time is a sleep, so that many workers on few cores do not make each other late.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import kvstore as kv

FETCH_S, BACKWARD_S, MORE_S = 0.01, 0.03, 0.05
SIZE = 20_000  # elements: at 12.5 Mbit/s, 50 ms
STALENESS = 2


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """Batches that take a while to read.

    Args:
        seconds: returns how long one takes.
    """

    def __init__(self, seconds: Any) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(self._seconds())
        return torch.ones(1)


class Slow(torch.autograd.Function):
    """A layer whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the value, as it is."""
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Take the seconds."""
        time.sleep(ctx.seconds)
        return gradients[0], None


def main() -> None:
    """Do rounds until the file of ``--end`` is there."""
    options = argparse.ArgumentParser()
    options.add_argument("--kind", default="dist_sync")
    options.add_argument("--rank", type=int, help="which worker is late; none by default")
    options.add_argument("--in", dest="where", choices=["input", "backward", "network"], default="backward")
    options.add_argument("--begun", type=Path, required=True, help="is made by worker 0 after its tenth round")
    options.add_argument("--late", type=Path, required=True, help="from when on this file is there, the worker is late")
    options.add_argument("--end", type=Path, required=True)
    args = options.parse_args()

    store = kv.create(args.kind, **({"staleness": STALENESS} if args.kind == "dist_ssp" else {}))
    store.init("w", torch.zeros(SIZE))
    if args.kind == "dist_ssp":
        store.set_optimizer("sgd", learning_rate=0.01)

    def more(where: str) -> float:
        return MORE_S if store.rank == args.rank and where == args.where and args.late.exists() else 0.0

    weight, out = torch.ones(SIZE, requires_grad=True), torch.empty(SIZE)
    batches = torch.utils.data.DataLoader(Batches(lambda: FETCH_S + more("input")))
    for number, batch in enumerate(batches, 1):
        loss = (Slow.apply(weight, BACKWARD_S + more("backward")) * batch).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        store.pushpull("w", gradient, out)
        if number == 10 and store.rank == 0:
            args.begun.touch()
        if args.end.exists():
            break
    store.join()


if __name__ == "__main__":
    main()
