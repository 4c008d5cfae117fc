"""Rounds whose versions readers follow: how long the rounds take, and when readers have each version, whole.

Workers push ones for some of the elements, the same in all rounds, and servers update by SGD at a rate of 1. So these
elements say after which round they are, which the label of a version says, too. Blocks of rounds take turns: with
nothing published, with versions that nobody follows, with followers, and with files in place of versions.
"""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvstore as kv
from benchmarks.networks import shapes_of
from benchmarks.programs.servers import memory_of_servers
from benchmarks.programs.stopwatch import parser, report
from benchmarks.programs.versions import LIMIT_S, wait_for
from kvstore.errors import DeadlineExceeded

WAYS = ("nothing", "published", "followed", "files")
WARM_UP = 5
POLL_S = 0.005
SETTLE_S = 0.5  # between two blocks: readers end what they have begun
WAIT_S = 2.0  # of a reader for a version
TMPFS = Path("/dev/shm")  # noqa: S108 - the names in it are those of a directory that only this run has

State = dict[str, torch.Tensor]


def main() -> None:
    """Measure; worker 0 reports, and each reader leaves a file of its own."""
    options = parser()
    options.add_argument("--net", default="small-decoder")
    options.add_argument("--share", type=float, default=1.0, help="of the elements, that each round changes")
    options.add_argument("--every", type=float, default=1.0, help="seconds from one version to the next; 0: each round")
    options.add_argument("--ways", nargs="+", choices=WAYS, required=True, help="of the blocks, in turn")
    options.add_argument("--blocks", type=int, default=1, help="of each way, with --rounds rounds")
    options.add_argument("--compute-s", type=float, default=0.0, help="how long workers compute before each round")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--readers", type=int, default=1, help="how many there are in all")
    options.add_argument("--reader", type=int, default=-1, help="the first one of this process; by default a worker")
    options.add_argument("--threads", type=int, default=1, help="of this process, each with a reader")
    options.add_argument("--folder", type=Path, required=True, help="in which processes find each other")
    args = options.parse_args()
    torch.set_num_threads(1)
    if args.reader < 0:
        work(args)
        return
    readers = range(args.reader, args.reader + args.threads)
    threads = [threading.Thread(target=follow, args=(args, reader)) for reader in readers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if missing := [reader for reader in readers if not (args.folder / f"reader{reader}").exists()]:
        raise SystemExit(f"readers {missing} have failed")  # and their threads have said why


def arrays(args: argparse.Namespace) -> tuple[State, State]:
    """Return zeros by name, and what changes of each in a round."""
    generator = torch.Generator().manual_seed(0)
    state = {f"layer{number}": torch.zeros(shape) for number, shape in enumerate(shapes_of(args.net))}
    changes = {name: torch.rand(each.shape, generator=generator) < args.share for name, each in state.items()}
    return state, {name: each.float() for name, each in changes.items()}


def work(args: argparse.Namespace) -> None:
    """Train, and report by way how long a round took in each block, and which versions there were when."""
    store = kv.create("dist_sync")
    weights, changes = arrays(args)
    keys, outs, gradients = list(weights), list(weights.values()), list(changes.values())
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(keys, outs)
    first = store.rank == 0
    rounds, due, square = 0, 0.0, torch.ones(500, 500)
    times: dict[str, list[float]] = {way: [] for way in args.ways}
    versions: dict[str, dict[int, float]] = {way: {} for way in args.ways}
    memory: list[list[dict[str, float]]] = []

    def one_round(way: str) -> None:
        nonlocal rounds, due
        start = time.monotonic()
        while time.monotonic() < start + args.compute_s:
            square @ square
        store.pushpull(keys, gradients, out=outs)
        rounds += 1
        if first and way != "nothing" and start >= due:
            due = start + args.every
            versions[way][rounds] = time.monotonic()
            if way == "files":
                made = _file(args).with_suffix(".made")
                save_file(weights, made, {"rounds": f"{rounds}"})
                made.replace(_file(args))
            else:
                store.publish(label=f"{rounds}")
                memory.append(memory_of_servers())

    if first:
        (args.folder / "made").touch()
        for reader in range(args.readers):
            wait_for(args.folder / f"ready{reader}")
    for way in args.ways * args.blocks:
        if first:
            (args.folder / "way").write_text(way)
            time.sleep(SETTLE_S)
        store.barrier()
        for _ in range(WARM_UP):
            one_round(way)
        start = time.monotonic()
        for _ in range(args.rounds):
            one_round(way)
        times[way].append(1000 * (time.monotonic() - start) / args.rounds)
    if first:
        time.sleep(WAIT_S)  # the last version comes to all readers
        (args.folder / "way").write_text("end")
        for reader in range(args.readers):
            wait_for(args.folder / f"reader{reader}")
        _file(args).unlink(missing_ok=True)
        report(args.report, times=times, versions=versions, memory=memory)
    store.barrier()
    store.close()


def follow(args: argparse.Namespace, reader: int) -> None:
    """Have versions while there are any to follow, and leave a line for each: its rounds, and when it was here."""
    state, changes = arrays(args)
    where = {name: each.view(-1).nonzero().view(-1) for name, each in changes.items() if not each.all()}
    lines: list[str] = []
    wait_for(args.folder / "made")
    with kv.connect(args.folder / "readers.json", timeout=LIMIT_S) as link:
        model = link.follow(state)
        (args.folder / f"ready{reader}").touch()
        seen = 0
        while (way := _read(args.folder / "way")) != "end":
            rounds = ""
            if way == "followed":
                with suppress(DeadlineExceeded):
                    model.wait_newer(WAIT_S)
                    rounds = model.label
            elif way == "files" and _file(args).exists() and _file(args).stat().st_ino != seen:
                seen = _file(args).stat().st_ino
                with safe_open(_file(args), "pt") as file:
                    rounds = file.metadata()["rounds"]
                    for name, array in state.items():
                        array.copy_(file.get_tensor(name))
            if not rounds:
                time.sleep(POLL_S)
                continue
            lines.append(f"{rounds} {time.monotonic()!r}\n")
            require_whole(state, where, -args.workers * int(rounds))
    made = args.folder / f"reader{reader}.made"
    made.write_text("".join(lines))
    made.rename(made.with_suffix(""))


def require_whole(state: State, where: State, value: float) -> None:
    """Raise ``RuntimeError`` unless all elements that change have ``value``: those at ``where``, or all of an array."""
    for name, array in state.items():
        there = array.view(-1)[where[name]] if name in where else array
        if there.numel() and not there.min() == there.max() == value:
            raise RuntimeError(f"{name} has {there.min():g} to {there.max():g}, and not {value:g}")


def _file(args: argparse.Namespace) -> Path:
    return TMPFS / f"{args.folder.name}.safetensors"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
