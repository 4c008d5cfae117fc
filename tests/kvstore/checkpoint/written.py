"""Checkpoints made by hand, with any placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from placed import cut_anywhere

from kvstore.checkpoint import folders
from kvstore.checkpoint.checkpoint_reader import state_name, value_name
from kvstore.checkpoint.manifest import Manifest, StoredSegment, StoredStore, save_manifest
from kvstore.checkpoint.tensors import TensorHeader, write_tensors
from kvstore.values import spec_of, to_buffer


def write(
    directory: Path,
    number: int,
    arrays: Mapping[str, torch.Tensor],
    states: Mapping[tuple[str, str], torch.Tensor] | None = None,
    servers: int = 2,
    bound: int = 100,
    longest: int = 1 << 30,
    whole: bool = True,
) -> Path:
    """Write checkpoint ``number`` of one store, as ``servers`` servers would; without a manifest if not ``whole``.

    Arrays are cut at any element, as older versions did.
    """
    states = states or {}
    specs = {key: spec_of(value) for key, value in arrays.items()}
    placed = cut_anywhere(specs, servers, bound, longest)
    folder = folders.begin(directory, number)
    segments: list[StoredSegment] = []
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(servers)]
    for key, ranges in placed.items():
        for server, start, stop in ranges:
            segment = len(segments)
            segments.append(StoredSegment(segment, key, start, stop, number, server))
            tensors[server][value_name(segment)] = arrays[key].reshape(-1)[start:stop]
            for (other, name), value in states.items():
                if other == key:
                    cut = len(ranges) > 1 and value.dim()
                    tensors[server][state_name(segment, name)] = value.reshape(-1)[start:stop] if cut else value
    files = [
        write_tensors(folder / f"store-0.server-{server}.safetensors", headers(held), contents(held), {})
        for server, held in enumerate(tensors)
    ]
    store = StoredStore(1, "sync", "sgd" if states else None, specs, segments)
    if whole:
        save_manifest(folder, Manifest(number, number * 10, 2, servers, "2026-01-01T00:00:00Z", [store], files))
    return folder


def headers(tensors: Mapping[str, torch.Tensor]) -> list[TensorHeader]:
    return [TensorHeader(name, spec_of(value).dtype, list(value.shape)) for name, value in tensors.items()]


def contents(tensors: Mapping[str, torch.Tensor]) -> Sequence[memoryview]:
    return [to_buffer(value.contiguous()) for value in tensors.values()]
