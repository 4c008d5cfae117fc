"""Versions of a model in bf16, from one process to readers: how long until the last of them has each, whole."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import kvstore as kv
from benchmarks.networks import elements, shapes_of
from benchmarks.programs.versions import LIMIT_S, POLL_S, Version, options, take_part, wait_for

TMPFS = Path("/dev/shm")  # noqa: S108 - the names in it are those of a directory that only this run has


def main() -> None:
    """Measure; the publisher reports."""
    args = options(["kvstore", "gloo", "safetensors"])
    torch.set_num_threads(1)
    shapes = shapes_of(args.net)
    flat = torch.zeros(elements(shapes), dtype=torch.bfloat16)
    parts = flat.split([shape.numel() for shape in map(torch.Size, shapes)])
    state = {f"layer{n}": part.view(shape) for n, (part, shape) in enumerate(zip(parts, shapes, strict=True))}
    way = {"kvstore": ours, "gloo": gloo, "safetensors": files}[args.who]
    version, close = way(args, flat, state)
    take_part(args, flat.view(torch.int16).numpy(), version)
    close()


def ours(args: argparse.Namespace, _flat: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[Version, Any]:
    made = args.folder / "made"
    if args.reader < 0:
        store = kv.create("dist_sync")
        made.touch()
        return lambda _: store.publish_state(state), store.close
    wait_for(made)
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
