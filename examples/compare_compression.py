#!/usr/bin/env python3
"""What compressing gradients costs in accuracy, and how much it saves: one network, trained once for each way.

    launch.py -n 2 -s 2 --launcher local "python compare_compression.py --plot compression.png"
    launch.py -n 2 -s 2 --launcher local "python compare_compression.py --codecs fp32 2bit topk:ratio=0.05,momentum=0.9"

Everything but the compression is the same: the residual network of `make demo` on handwritten digits, with the
same initial weights and the same batches. Each way has its own store, whose statistics count the bytes that were sent.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import Parser, natural, positive
from cifar import digits, options, resnet, results
from cifar.choice import first
from cifar.images import DataError, Dataset
from cifar.loaders import train_loader, validation_loader
from cifar.options import learning_rate, usual_steps
from cifar.settings import parse_setting
from torch import Tensor, nn
from torch.nn import functional

import kvstore as kv
from workers import Reducer, Trainer

# Elements of this network's gradients are mostly 0.002 to 0.02; thresholds have that unit. With 1bit an element is +1
# or -1, so the loss is scaled up until gradients are of that order, and updates are scaled down. Ways that hold back
# much for later steps do without the momentum of the servers' optimizer; see docs/compression.md.
CODECS = {
    "fp32": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "2bit": "2bit:threshold=0.02,mom=0,lr=0.3",
    "1bit": "1bit:threshold=0,scale=50,mom=0,lr=0.3",
    "topk": "topk:ratio=0.01,mom=0,lr=0.3",
    "threshold": "threshold:threshold=0.02,mom=0,lr=0.3",
    "randomk": "randomk:ratio=0.1,mom=0,lr=0.3",
    "powersgd": "powersgd:rank=2,mom=0,lr=0.3",
    "fp16+pull": "fp16:pull=fp16",
}
FORMATS = {  # of the columns
    "accuracy": "{:.4f}",
    "pushed_bytes": "{:,}",
    "pushed_part": "{:.5f}",
    "pulled_bytes": "{:,}",
    "pulled_part": "{:.5f}",
}


@dataclass(frozen=True)
class Way:
    """A way to compress.

    Attributes:
        name: the name in the table.
        compression: the options for the store.
        scale: the factor of the loss; updates are divided by it.
        lr, mom: learning rate and momentum of the optimizer.
    """

    name: str
    compression: dict[str, object]
    scale: float = 1.0
    lr: float = 0.05
    mom: float = 0.9


@dataclass
class Result:
    """The result of a way: after each epoch, the accuracy, and the bytes that rank 0 has pushed and pulled so far.

    Attributes:
        way: the way to compress.
        plain: the bytes that would be pushed without compression; as many would be pulled.
        seconds: how long the training took.
        accuracy, pushed, pulled: a value for each epoch.
    """

    way: Way
    plain: int = 0
    seconds: float = 0.0
    accuracy: list[float] = field(default_factory=list)
    pushed: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """Return the row in the table."""
        return {
            "codec": self.way.name,
            "accuracy": self.accuracy[-1],
            "pushed_bytes": self.pushed[-1],
            "pushed_part": self.pushed[-1] / self.plain,
            "pulled_bytes": self.pulled[-1],
            "pulled_part": self.pulled[-1] / self.plain,
            "seconds": round(self.seconds, 2),
        }


def main() -> None:
    """Train in each way, and print the results. Errors that the user can fix are printed in one line."""
    args = parse()
    try:
        if args.plot:
            results.require_plots()
        dataset = first(digits.read_dataset(), args.num_examples)
        outcomes = []
        with Reducer("dist_sync") as reducer:
            for number, way in enumerate(args.codecs, 1):
                with kv.create("dist_sync") as store:
                    if store.rank == 0:
                        print(f"{way.name}, {number} of {len(args.codecs)}: {args.num_epochs} epochs", flush=True)
                    outcomes.append(train(args, way, dataset, store, reducer))
                    rank = store.rank
                if rank == 0:
                    print(f"{way.name}: validation accuracy {outcomes[-1].accuracy[-1]:.4f}", flush=True)
        if rank == 0:
            report(args, outcomes)
    except (DataError, results.PlotError, kv.KVStoreError) as exc:
        sys.exit(f"compare_compression.py: error: {exc}")


def train(args: Namespace, way: Way, dataset: Dataset, store: kv.KVStore, reducer: Reducer) -> Result:
    """Run one worker's part of one training."""
    pictures_of = options.parse(["--batch-size", f"{args.batch_size}", "--seed", f"{args.seed}"])
    batches, held_out = train_loader(dataset, pictures_of, store), validation_loader(dataset, pictures_of, store)
    torch.manual_seed(args.seed)
    model = resnet.build("resnet", 8)
    trainer = Trainer(
        model.named_parameters(),
        "sgd",
        {"learning_rate": way.lr, "momentum": way.mom, "wd": 1e-4, "rescale_grad": 1 / way.scale},
        kvstore=store,
        compression_params=way.compression,
    )
    schedule = Namespace(lr=way.lr, lr_factor=0.1, lr_period=None, lr_step_epochs=usual_steps(args.num_epochs))
    before, start = store.statistics(), time.perf_counter()
    size = sum(p.numel() for p in model.parameters())
    result = Result(way, plain=4 * size * len(batches) * args.num_epochs)
    for epoch in range(args.num_epochs):
        trainer.set_learning_rate(learning_rate(schedule, epoch))
        model.train()
        for pictures, labels in batches:
            trainer.zero_grad()
            (functional.cross_entropy(model(pictures), labels) * way.scale).backward()
            trainer.step()
        reducer.average(statistics(model))
        counts = reducer.sum(validate(model.eval(), held_out))
        now = store.statistics()
        result.accuracy.append(counts["right"] / counts["count"])
        result.pushed.append(now.bytes_pushed - before.bytes_pushed)
        result.pulled.append(now.bytes_pulled - before.bytes_pulled)
    result.seconds = time.perf_counter() - start
    return result


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the means and variances of batch normalization; they differ by worker, as its images do."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the number of images in `batches`, and how many of them the model classifies correctly."""
    counts = {"right": 0.0, "count": 0.0}
    for pictures, labels in batches:
        counts["right"] += float((model(pictures).argmax(1) == labels).sum())
        counts["count"] += len(labels)
    return counts


def report(args: Namespace, outcomes: Sequence[Result]) -> None:
    """Print the table, and write the files of --csv and --plot."""
    rows = [result.row() for result in outcomes]
    print(results.table([{name: FORMATS.get(name, "{}").format(value) for name, value in row.items()} for row in rows]))
    if args.csv:
        results.write_csv(args.csv, rows)
    if args.plot:
        plot(args.plot, outcomes)


def plot(path: Path, outcomes: Sequence[Result]) -> None:
    """Plot accuracy against bytes: at the end, and after each epoch."""
    figure, (ends, curves) = results.figure(2)
    for number, result in enumerate(outcomes):
        style: Any = {"color": f"C{number % 10}", "marker": "os^v"[number // 10 % 4]}
        megabytes = [pushed / 1e6 for pushed in result.pushed]
        ends.plot(megabytes[-1:], result.accuracy[-1:], linestyle="", **style)
        at = megabytes[-1], result.accuracy[-1]
        ends.annotate(result.way.name, at, (2, 6), textcoords="offset points", rotation=60, fontsize="small")
        curves.plot(megabytes, result.accuracy, markersize=3, label=result.way.name, **style)
    ends.margins(0.15, 0.25)  # room for the names
    ends.set_title("at the end")
    curves.set_title("after each epoch")
    curves.legend(fontsize="small")
    for axes in (ends, curves):
        axes.set_xscale("log")
        axes.set_xlabel("MB pushed by a worker")
        axes.set_ylabel("validation accuracy")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Accuracy against bytes, for each way to compress gradients, on handwritten digits")
    parser.add_argument(
        "--codecs",
        nargs="+",
        type=parse_way,
        default=[parse_way(name) for name in CODECS],
        metavar="CODEC",
        help=f"of {', '.join(CODECS)} (all by default); or as 2bit:threshold=0.02,pull=fp16, where scale, lr and mom "
        "can be given, too",
    )
    parser.add_argument("--num-epochs", type=positive, default=15, help="epochs to train, each way")
    parser.add_argument("--batch-size", type=positive, default=32, help="images in a batch of each worker")
    parser.add_argument("--num-examples", type=positive, help="number of training images; all if not given")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the initial weights and the batches")
    parser.add_argument("--plot", type=Path, help="write a plot (PNG) to this file; needs matplotlib")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    return parser.parse_args(argv)


def parse_way(text: str) -> Way:
    """Parse a name in `CODECS`, or a type of compression and its parameters: `topk:ratio=0.05,momentum=0.9`."""
    kind, numbers = parse_setting(CODECS.get(text, text))
    changed = {name: float(numbers.pop(name)) for name in ("scale", "lr", "mom") if name in numbers}
    return Way(text, {"type": kind, **numbers}, **changed)


if __name__ == "__main__":
    main()
