#!/usr/bin/env python3
"""What it takes to train over a slow line: bytes, seconds and loss, of synchronous training and of DiLoCo.

    launch.py -n 2 -s 2 -H hosts "python compare_slow_line.py --seeds 1 2 3 --csv slow-line.csv"
    launch.py -n 2 -s 2 --launcher local "python compare_slow_line.py --ways synchronous diloco --all='--width 32'"

Each way is a run of train_lm.py with other options, and has its own store. The loss is that of held-out text. The line
is the network between the hosts, as their interfaces count it: everything but the loopback. On one host it has nothing.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import Parser, natural
from cifar import results
from lm import options, text
from train_lm import train

import kvstore as kv
from workers import Reducer

ALONE = "alone"
# A small network, so that several runs take minutes on two cores. The rates were chosen with seed 0.
NETWORK = "--layers 2 --width 64 --context 64 --eval-every 100000 --sample 0"
INT8 = "--compress int8 --compress-back int8"
SYNCHRONOUS = "--steps 1000 --lr 1e-2"
DILOCO = f"--steps 1250 --lr 6e-3 --inner-steps 20 --outer-lr 0.8 --outer-momentum 0.5 {INT8}"
WAYS = {  # the options of train_lm.py
    "synchronous": SYNCHRONOUS,
    "synchronous-int8": f"{SYNCHRONOUS} {INT8}",
    "diloco": DILOCO,
    "streaming": f"{DILOCO} --fragments 3 --overlap 2",
    ALONE: "--steps 1250 --lr 6e-3",  # each worker by itself, with half as many samples a step
}
DEVICES = Path("/proc/net/dev")


@dataclass(frozen=True)
class Row:
    """A line of the table: a run.

    Attributes:
        way, seed, steps: what was run, and for how many steps.
        bits: bits per character of the held-out text.
        megabytes: the gradients, weights and differences that worker 0 has sent and received.
        line_megabytes: all that worker 0's host has sent and received over the network, evaluations included.
        seconds: how long the steps took, without the evaluations.
    """

    way: str
    seed: int
    steps: int
    bits: float
    megabytes: float
    line_megabytes: float
    seconds: float


def main() -> None:
    """Train in each way, and print the results. Errors that the user can fix are printed in one line."""
    args = parse()
    rows = []
    try:
        with kv.create("dist_sync") as place:
            rank, reducer = place.rank, Reducer.over(place)
            for seed in args.seeds:
                for way in args.ways:
                    run = options.parse(shlex.split(f"{NETWORK} {WAYS[way]} {args.all} --seed {seed}"))
                    before = on_the_line()
                    with kv.create("local" if way == ALONE else "dist_sync") as store:
                        corpus = text.load(run.text or text.ours(), run.context)
                        result = train(run, corpus, store, reducer)
                    moved, line = (result.sent + result.received) / 1e6, since(before) / 1e6
                    rows.append(Row(way, seed, run.steps, result.bits, moved, line, result.seconds))
                    if rank == 0:
                        print(table(rows[-1:]), flush=True)
    except (text.TextError, kv.KVStoreError) as exc:
        sys.exit(f"compare_slow_line.py: error: {exc}")
    if rank == 0:
        print(table(rows))
        if args.csv:
            results.write_csv(args.csv, [asdict(row) for row in rows])


def on_the_line() -> dict[str, int]:
    """Return the bytes that this host has sent and received over each of its interfaces, without the loopback."""
    counted = {}
    for line in DEVICES.read_text().splitlines()[2:] if DEVICES.exists() else ():
        name, counts = line.split(":")
        if name.strip() != "lo":
            received, sent = (int(counts.split()[column]) for column in (0, 8))
            counted[name.strip()] = received + sent
    return counted


def since(before: Mapping[str, int]) -> int:
    """Return the bytes that this host has sent and received since `on_the_line` returned `before`."""
    return sum(now - before.get(name, 0) for name, now in on_the_line().items())


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    formats = ("{}", "{}", "{}", "{:.3f}", "{:.1f}", "{:.1f}", "{:.1f}")
    cells = [zip(asdict(row).items(), formats, strict=True) for row in rows]
    return results.table([{name: how.format(value) for (name, value), how in row} for row in cells])


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse `argv`, by default the program's arguments. An invalid option ends the program with a message."""
    parser = Parser("Loss, bytes and seconds of ways to train over a slow line")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to run; everything by default"
    )
    parser.add_argument("--seeds", nargs="+", type=natural, default=[1], help="seeds of weights and batches")
    parser.add_argument("--all", default="", metavar="OPTIONS", help="more options of train_lm.py, for each run")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    try:
        shlex.split(args.all)
    except ValueError as exc:
        parser.error(f"--all={args.all!r} cannot be read: {exc}")
    return args


if __name__ == "__main__":
    main()
