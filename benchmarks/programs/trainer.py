"""A worker's rounds as ``Trainer`` makes them, each of all arrays of a network; backward is not timed."""

from __future__ import annotations

import torch
from torch import nn

import kvstore as kv
from benchmarks.networks import shapes_of
from benchmarks.programs.stopwatch import measured, parser, report
from workers import Trainer


def main() -> None:
    """Measure; rank 0 reports. What is pushed during backward would not be timed, so all is pushed in the step."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="none")
    options.add_argument("--overlap", action="store_true")
    args = options.parse_args()

    store = kv.create(args.type)
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes_of(args.net)])
    gradients = [torch.randn_like(param) for param in model]
    on_servers = args.optimizer != "none"
    how = {"overlap": "auto" if args.overlap else False, "update_on_kvstore": on_servers}
    trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.01}, store, **how)

    def before() -> None:
        trainer.zero_grad()
        sum((param * gradient).sum() for param, gradient in zip(model, gradients, strict=True)).backward()
        store.barrier()

    def one_round() -> None:
        if on_servers:
            trainer.step()
        else:
            trainer.allreduce_grads()

    for _ in range(11 if args.overlap else 0):
        before()
        one_round()
    figures = measured(one_round, args.rounds, before)
    if store.rank == 0:
        report(args.report, **figures, overlaps=trainer.overlaps)
    store.close()


if __name__ == "__main__":
    main()
