#!/usr/bin/env python3
"""What a slow worker costs, and how much stores save that do not wait for it: accuracy over time.

    python async_stragglers.py --plot stragglers.png
    python async_stragglers.py --modes dist_sync dist_ssp:staleness=10

It starts a job on this machine for each type of store. The workers train on handwritten digits, and the last one is
five times as slow as the others. The network is small, and workers sleep so that every batch takes the same time, as if
each had its own device. So the results are about waiting and not about this machine's cores.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arguments import Parser, natural, positive
from cifar import digits, results
from cifar.augment import normalize
from cifar.batches import part, seeded
from cifar.images import DataError, Dataset, Images
from cifar.settings import parse_setting
from torch import Tensor, nn
from torch.nn import functional

import kvstore as kv
import launcher
from workers import Trainer

MODES = (
    "dist_sync",
    "dist_sync:quorum=3",
    "dist_sync:quorum=3,late=keep",
    "dist_ssp:staleness=3",
    "dist_ssp:staleness=30",
    "dist_ssp:staleness=90",
    "dist_async",
    "dist_async:delay_compensation=0.04",
)


@dataclass
class WorkerReport:
    """The report of one worker.

    Attributes:
        curve: for rank 0, pairs of seconds since the start and validation accuracy.
        steps: the number of batches it has trained on.
        busy: the median time of computation per batch, in seconds.
        staleness: how often the values it read were so many pushes ahead of the slowest worker.
        late: the number of its arrays that came after their round had ended.
        ended: for rank 0, whether it has told all workers to stop.
    """

    curve: list[tuple[float, float]] = field(default_factory=list)
    steps: int = 0
    busy: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    late: int = 0
    ended: bool = False


class LastStep:
    """The step after which all workers stop, announced by rank 0.

    With a quorum of 1, rank 0's push is a whole round, and no worker waits. The round's sum stands for all workers.
    """

    def __init__(self) -> None:
        self._store = kv.create("dist_sync", quorum=1)
        self._store.init("last", torch.zeros(1))

    def say(self, step: int) -> None:
        """Announce the last step; return when every worker that asks gets it."""
        self._store.push("last", torch.tensor([step / self._store.num_workers])).wait()

    def is_over(self, step: int) -> bool:
        """Whether `step` was the last step."""
        told = torch.empty(1)
        self._store.pull("last", out=told)
        return 0 < round(float(told)) <= step


def main() -> None:
    """Run a job for each mode, and print the results. Errors that the user can fix are printed in one line."""
    args = parse()
    try:
        if args.plot:
            results.require_plots()
        by_mode: dict[str, list[WorkerReport]] = {}
        for number, mode in enumerate(args.modes, 1):
            print(f"{mode}, {number} of {len(args.modes)}: at most {args.max_seconds:g} s", flush=True)
            by_mode[mode] = launcher.run(train, (mode, args), num_workers=args.num_workers, num_servers=1)
            seconds, accuracy = by_mode[mode][0].curve[-1]
            print(f"{mode}: validation accuracy {accuracy:.4f} after {seconds:.1f} s", flush=True)
        report(args, by_mode)
    except (DataError, results.PlotError, kv.KVStoreError, launcher.LaunchError) as exc:
        sys.exit(f"async_stragglers.py: error: {exc}")


def train(mode: str, args: Namespace) -> WorkerReport:
    """One worker's part: batch after batch, until rank 0 says that the accuracy is reached or the time is up."""
    kind, options = parse_setting(mode)
    in_step = kind == "dist_sync" and "quorum" not in options
    store, last = kv.create(kind, **options), LastStep()
    pace = args.step_time * (args.slow_factor if store.rank == store.num_workers - 1 else 1.0)
    dataset = digits.read_dataset()
    pictures, labels = tensors(dataset, part(dataset.train, store.rank, store.num_workers))
    validation = tensors(dataset, dataset.validation)
    generator = seeded(args.seed, store.rank)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    params = {"learning_rate": args.lr, "momentum": args.mom}
    trainer = Trainer(model.named_parameters(), "sgd", params, kvstore=store)

    seen, busy = WorkerReport(), []
    store.barrier()
    start = time.perf_counter()
    for step in count(1):
        began = time.perf_counter()
        chosen = torch.randint(len(labels), (args.batch_size,), generator=generator)
        trainer.zero_grad()
        functional.cross_entropy(model(pictures[chosen]), labels[chosen]).backward()
        busy.append(time.perf_counter() - began)
        time.sleep(max(0.0, pace - busy[-1]))
        trainer.step()
        if store.rank == 0 and not seen.ended:
            seen.curve.append((time.perf_counter() - start, accuracy(model, *validation)))
            seen.ended = seen.curve[-1][1] >= args.target or seen.curve[-1][0] >= args.max_seconds
            if seen.ended:
                # In step, all must make the same number of steps. Else each may leave: nobody waits for it then.
                last.say(step + 1 if in_step else 1)
        if last.is_over(step):
            break
    numbers = store.statistics()
    seen.steps, seen.busy = step, median(busy)
    seen.staleness, seen.late = Counter(numbers.staleness), numbers.late
    return seen


def tensors(dataset: Dataset, images: Images) -> tuple[Tensor, Tensor]:
    """Return images as input of the network, and their labels."""
    return normalize(images.pixels, dataset.mean, dataset.std), images.labels


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor) -> float:
    """Return the fraction of images that the model classifies correctly."""
    return float((model(pictures).argmax(1) == labels).float().mean())


def report(args: Namespace, by_mode: dict[str, list[WorkerReport]]) -> None:
    """Print the table, and write the files of --csv and --plot."""
    rows = [row(args, mode, workers) for mode, workers in by_mode.items()]
    print(results.table([{name: str(value) for name, value in row.items()} for row in rows]))
    if args.csv:
        results.write_csv(args.csv, rows)
    if args.plot:
        plot(args, by_mode)


def row(args: Namespace, mode: str, workers: Sequence[WorkerReport]) -> dict[str, object]:
    """Return the row of a mode in the table."""
    reached = [seconds for seconds, accuracy in workers[0].curve if accuracy >= args.target]
    staleness = sum((seen.staleness for seen in workers), Counter[int]())
    return {
        "store": mode,
        f"seconds to {args.target:g}": f"{reached[0]:.1f}" if reached else "-",
        "best": f"{max(accuracy for _, accuracy in workers[0].curve):.4f}",
        "steps of the fast": max(seen.steps for seen in workers),
        "of the slow": workers[-1].steps,
        "mean staleness": f"{sum(n * times for n, times in staleness.items()) / staleness.total():.1f}"
        if staleness
        else "-",
        "most": max(staleness, default="-"),
        "late arrays": sum(seen.late for seen in workers),
        "busy ms": f"{1000 * max(seen.busy for seen in workers):.0f}",
    }


def plot(args: Namespace, by_mode: dict[str, list[WorkerReport]]) -> None:
    """Plot accuracy over time, and the staleness of what workers read."""
    figure, (curves, staleness) = results.figure(2)
    for number, (mode, workers) in enumerate(by_mode.items()):
        style: Any = {"color": f"C{number % 10}", "label": mode}
        curves.plot(*zip(*workers[0].curve, strict=True), **style)
        counts = sum((seen.staleness for seen in workers), Counter[int]())
        if counts:
            numbers = sorted(counts)
            staleness.step(numbers, [counts[n] / counts.total() for n in numbers], where="mid", **style)
    curves.axhline(args.target, color="gray", linewidth=0.8, linestyle="--")
    curves.set_xlabel("seconds")
    curves.set_ylabel("validation accuracy")
    staleness.set_xlabel("pushes ahead of the slowest worker")
    staleness.set_ylabel("part of what was read")
    for axes in (curves, staleness):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(args.plot, dpi=120, format="png")


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Accuracy over time with one slow worker, for each kind of store, on handwritten digits")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        metavar="STORE",
        help=f"stores and options, such as {MODES[1]}; {len(MODES)} if not given",
    )
    parser.add_argument("--num-workers", type=positive, default=4, help="number of workers; the last one is slow")
    parser.add_argument("--slow-factor", type=float, default=5.0, help="how many times longer its batches take")
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds of a batch of the others")
    parser.add_argument("--batch-size", type=positive, default=16, help="images in a batch of each worker")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--mom", type=float, default=0.0, help="momentum")
    parser.add_argument("--target", type=float, default=0.95, help="stop at this validation accuracy")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="or after so many seconds")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the initial weights and the batches")
    parser.add_argument("--plot", type=Path, help="write a plot (PNG) to this file; needs matplotlib")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
