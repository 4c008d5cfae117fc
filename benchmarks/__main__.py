"""``python -m benchmarks pushpull``: rounds of push and pull, beside gloo's all-reduce, in one run; prints ratios."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.networks import NETWORKS

HERE = Path(__file__).parent


def launch(workers: int, servers: int, command: list[str]) -> dict[str, float]:
    """Run ``command`` as the workers of a job on this machine; return what rank 0 printed."""
    job = [sys.executable, "-m", "launcher", "-n", str(workers), "-s", str(servers), "--launcher", "local"]
    done = subprocess.run(
        [*job, shlex.join([sys.executable, *command])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.partition("] ")[2].startswith("{")]
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def pushpull(args: argparse.Namespace) -> None:
    """Print a table of medians, and their ratios to gloo's, which only sums."""
    print(f"{args.net}, {args.workers} workers, {args.servers} servers, median of {args.rounds} rounds, ms")
    with tempfile.TemporaryDirectory() as scratch:
        common = ["--net", args.net, "--rounds", str(args.rounds)]
        gloo = launch(args.workers, 1, [str(HERE / "gloo.py"), *common, "--file", str(Path(scratch) / "meet")])
        print(f"{'gloo all_reduce, one flat tensor':40} {gloo['median']:8.2f}   1.00", flush=True)
        for kind, optimizer in (("dist_sync", "none"), ("dist_sync", "sgd"), ("dist_async", "sgd")):
            command = [str(HERE / "round.py"), *common, "--type", kind, "--optimizer", optimizer]
            ours = launch(args.workers, args.servers, command)
            ratio = ours["median"] / gloo["median"]
            print(f"{f'{kind}, optimizer {optimizer}':40} {ours['median']:8.2f} {ratio:6.2f}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=["pushpull"])
    parser.add_argument("--net", choices=sorted(NETWORKS), default="resnet50")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    pushpull(parser.parse_args())


if __name__ == "__main__":
    main()
