"""A worker's rounds as ``Trainer`` makes them, each of all arrays of a network: the time of its step."""

from __future__ import annotations

import torch
from torch import nn

import kvstore as kv
from benchmarks.networks import shapes_of
from benchmarks.programs.stopwatch import measured, parser, report
from workers import Trainer

WATCHED = 11  # steps before Trainer pushes during backward


def main() -> None:
    """Measure; rank 0 reports. ``--in-step``: nothing is pushed during backward, which is not timed."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("--in-step", action="store_true")
    options.add_argument("--copied", action="store_true", help="share no memory")
    args = options.parse_args()

    store = kv.create("dist_sync")
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes_of(args.net)])
    factors = [torch.randn_like(param) for param in model]
    share = False if args.copied else None
    trainer = Trainer(
        model.named_parameters(),
        "sgd",
        {"learning_rate": 0.01},
        store,
        overlap=False if args.in_step else "auto",
        share_weights=share,
        share_gradients=share,
    )

    def backward() -> None:
        trainer.zero_grad()
        losses = [(param * factor).sum() for param, factor in zip(model, factors, strict=True)]
        torch.stack(losses).sum().backward()
        store.barrier()

    for _ in range(WATCHED):
        backward()
        trainer.step()
    figures = measured(trainer.step, args.rounds, backward)
    if store.rank == 0:
        report(args.report, **figures)
    store.close()


if __name__ == "__main__":
    main()
