"""Versions of a model, from one process to readers on its host: how long until the last of them has each, whole.

The publisher changes some elements of bf16 arrays, and publishes them when every reader has the version before. Each
reader notes when it has a version in its arrays. The clock is the host's, and the same for all processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import kvstore as kv
from benchmarks.networks import elements, shapes_of
from benchmarks.programs.stopwatch import parser, report
from kvstore.codecs.changes import checksum

POLL_S = 0.001
TMPFS = Path("/dev/shm")  # noqa: S108 - the names in it are those of a directory that only this run has
LIMIT_S = 600.0

Version = Callable[[int], Any]  # publishes a version of that number, or returns when this process has it


def main() -> None:
    """Measure; the publisher reports."""
    options = parser()
    options.add_argument("--who", choices=["kvstore", "gloo", "safetensors"], required=True)
    options.add_argument("--net", default="small-decoder")
    options.add_argument("--share", type=float, default=0.01, help="of the elements, that each version changes")
    options.add_argument("--readers", type=int, default=1)
    options.add_argument("--reader", type=int, default=-1, help="which reader this is; by default the publisher")
    options.add_argument("--folder", type=Path, required=True, help="in which processes find each other")
    args = options.parse_args()
    torch.set_num_threads(1)
    shapes = shapes_of(args.net)
    flat = torch.zeros(elements(shapes), dtype=torch.bfloat16)
    parts = flat.split([shape.numel() for shape in map(torch.Size, shapes)])
    state = {f"layer{n}": part.view(shape) for n, (part, shape) in enumerate(zip(parts, shapes, strict=True))}
    way = {"kvstore": ours, "gloo": gloo, "safetensors": files}[args.who]
    version, close = way(args, flat, state)
    if args.reader < 0:
        report(args.report, **published(args, flat, version))
    else:
        follow(args, flat, version)
    close()


def published(args: argparse.Namespace, flat: torch.Tensor, publish: Version) -> dict[str, Any]:
    """Publish all versions; return the times in ms until readers have each: from the call, and from its return."""
    rng = np.random.default_rng(0)
    bits = flat.view(torch.int16).numpy()
    bits[:] = rng.integers(0x3C00, 0x3F80, len(bits), np.int16)
    whole, after = [], []
    for reader in range(args.readers):
        _noted(args.folder / f"reader{reader}", 0)
    for number in range(1, 2 + args.rounds):
        bits[rng.integers(0, len(bits), int(args.share * len(bits)))] ^= 1
        began = time.monotonic()
        publish(number)
        returned = time.monotonic()
        visible = max(_noted(args.folder / f"reader{reader}", number) for reader in range(args.readers))
        whole.append(1000 * (visible - began))
        after.append(1000 * (visible - returned))
    for reader in range(args.readers):
        if _noted(args.folder / f"reader{reader}", number + 1) != float(checksum(bits) >> 16):
            raise SystemExit(f"reader {reader} does not have what was published")
    return {"first": whole[0], "first_after": after[0], "whole": whole[1:], "after": after[1:]}


def follow(args: argparse.Namespace, flat: torch.Tensor, wait: Version) -> None:
    """Wait for all versions, and note when each was here."""
    with (args.folder / f"reader{args.reader}").open("a", buffering=1) as notes:
        notes.write("0 0\n")  # it is ready
        for number in range(1, 2 + args.rounds):
            wait(number)
            notes.write(f"{number} {time.monotonic()!r}\n")
        notes.write(f"{number + 1} {checksum(flat.view(torch.int16).numpy()) >> 16}\n")


def _noted(path: Path, number: int) -> float:
    """Return what a reader has noted of a version, when it has."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            noted, _, value = line.partition(" ")
            if noted == str(number) and line.endswith("\n"):
                return float(value)
        time.sleep(POLL_S)
    raise SystemExit(f"{path.name} does not have version {number} after {LIMIT_S:g} s")


def ours(args: argparse.Namespace, _flat: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[Version, Any]:
    made = args.folder / "made"
    if args.reader < 0:
        store = kv.create("dist_sync")
        made.touch()
        return lambda _: store.publish_state(state), store.close
    while not made.exists():
        time.sleep(POLL_S)
    reader = kv.connect(args.folder / "readers.json")
    model = reader.follow(state)

    def wait(number: int) -> None:
        while model.version < number:
            model.wait_newer(LIMIT_S)

    return wait, reader.close


def gloo(args: argparse.Namespace, flat: torch.Tensor, _state: dict[str, torch.Tensor]) -> tuple[Version, Any]:
    meet = f"file://{args.folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=args.reader + 1, world_size=args.readers + 1)
    return lambda _: dist.broadcast(flat, 0), dist.destroy_process_group


def files(args: argparse.Namespace, _flat: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[Version, Any]:
    place = TMPFS / f"{args.folder.name}.safetensors"
    made = place.with_suffix(".tmp")

    def publish(number: int) -> None:
        save_file(state, made, {"number": str(number)})
        made.replace(place)

    seen: list[int] = [0]

    def wait(_: int) -> None:
        while not place.exists() or place.stat().st_ino == seen[0]:
            time.sleep(POLL_S)
        seen[0] = place.stat().st_ino
        for name, array in load_file(place).items():
            state[name].copy_(array)

    def close() -> None:
        if args.reader < 0:
            place.unlink()

    return (publish if args.reader < 0 else wait), close


if __name__ == "__main__":
    main()
