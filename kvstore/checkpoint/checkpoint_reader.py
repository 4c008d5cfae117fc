"""Checkpoints are read and verified: values and states of whole arrays, however many servers held their segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.checkpoint.manifest import Manifest, StoredSegment, load_manifest
from kvstore.checkpoint.tables import NUMBERS, Rest, StripeNames, are_rest, read_page, rest_name
from kvstore.checkpoint.tensors import DTYPES, opened
from kvstore.errors import CheckpointError
from kvstore.optim.states import StateTensors
from kvstore.rows.frozen_rows import Page
from kvstore.sealed_folders import record_of
from kvstore.spec import Key, Spec
from kvstore.table import Table, TableSpec
from kvstore.values import spec_of

VALUE, STATE = "value", "state"


def value_name(segment: int) -> str:
    return f"{segment}/{VALUE}"


def state_name(segment: int, state: str) -> str:
    return f"{segment}/{STATE}/{state}"


class CheckpointReader:
    """A checkpoint, opened to be read. Files are mapped: only what is asked for is read.

    Raises:
        CheckpointError: there is no manifest, or it is damaged. Methods raise it for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = load_manifest(folder)
        self._files: dict[int, Any] = {}
        self._by_segment: dict[int, dict[int, list[str]]] = {}  # by file: the names of each segment's tensors
        self._stack = ExitStack()
        self._segments: list[dict[Key, list[StoredSegment]]] = []
        for store in self.manifest.stores:
            by_key: dict[Key, list[StoredSegment]] = {key: [] for key in store.specs}
            for segment in sorted(store.segments, key=lambda each: each.start):
                by_key[segment.key].append(segment)
            self._segments.append(by_key)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._files.clear()
        self._stack.close()

    def value(self, store: int, key: Key) -> torch.Tensor:
        """Return the value of ``key``, in its shape; only to be read, for it may be the file's own memory."""
        spec = self.manifest.stores[store].specs[key]
        parts = []
        for segment in self._segments[store][key]:
            part = self._tensor(segment.file, value_name(segment.id))
            if spec_of(part) != Spec((segment.stop - segment.start,), spec.dtype):
                raise self._damaged(segment, value_name(segment.id), spec_of(part))
            parts.append(part)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(spec.shape)

    def states(self, store: int, keys: Iterable[Key]) -> StateTensors:
        """Return the optimizer's states of ``keys``, as if one server had held each whole."""
        whole: StateTensors = {}
        for key in keys:
            spec, segments = self.manifest.stores[store].specs[key], self._segments[store][key]
            for name in self._state_names(segments[0]) if segments else ():
                parts = [self._tensor(segment.file, state_name(segment.id, name)) for segment in segments]
                if len(parts) > 1 and parts[0].dim():
                    flat = torch.cat([part.reshape(-1) for part in parts])
                    if flat.numel() != spec.size:
                        raise self._damaged(segments[0], name, spec_of(flat))
                    whole[key, name] = flat.view(spec.shape)
                else:  # one segment, or a number that all segments have alike (a step count)
                    whole[key, name] = parts[0]
        return whole

    def pages(self, store: int, key: Key) -> Iterator[Page]:
        """Yield all rows of the table ``key``, one server's after the other's; only to be read."""
        table = self._table(store, key)
        for segment in self._segments[store][key]:
            names = StripeNames.of(self._names(segment))
            for page, parts in sorted(names.pages.items()):
                try:
                    yield read_page(table, segment.id, page, parts, partial(self._tensor, segment.file))
                except CheckpointError as exc:
                    raise CheckpointError(f"{self._path(segment.file)}: damaged: {exc}") from None

    def rests(self, store: int, key: Key) -> list[Rest]:
        """Return what each server had of the table ``key`` beside its rows, by ``RowTable.rest``."""
        rests = []
        for segment in self._segments[store][key]:
            names = StripeNames.of(self._names(segment)).rest
            read = partial(self._tensor, segment.file)
            if not are_rest(tensors := {name: read(rest_name(segment.id, name)) for name in names}):
                raise CheckpointError(f"{self._path(segment.file)}: damaged: it does not say how {key!r} goes on")
            rests.append({name: tensor.numpy() for name, tensor in tensors.items()})
        return rests

    def part(self, rank: int) -> tuple[dict[str, torch.Tensor], str] | None:
        """Return what worker ``rank`` added: tensors by name, and JSON; None if it added nothing."""
        file = self.manifest.parts.get(rank)
        if file is None:
            return None
        opened_file = self._file(file)
        tensors = {name: self._tensor(file, name) for name in opened_file.keys()}  # noqa: SIM118 - not a dict
        return tensors, (opened_file.metadata() or {}).get("state", "{}")

    def specs(self, file: int) -> dict[str, tuple[str, list[int]]]:
        """Return what file number ``file`` says of its tensors: by name, safetensors' dtype and the shape."""
        opened_file = self._file(file)
        slices = {name: opened_file.get_slice(name) for name in opened_file.keys()}  # noqa: SIM118 - not a dict
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}

    def _state_names(self, segment: StoredSegment) -> list[str]:
        prefix = state_name(segment.id, "")
        return [name.removeprefix(prefix) for name in self._names(segment) if name.startswith(prefix)]

    def _table(self, store: int, key: Key) -> Table:
        spec = self.manifest.stores[store].specs[key]
        if not isinstance(spec, TableSpec):
            raise CheckpointError(f"{self.folder}: {key!r} is {spec}, not a table")
        return spec.table

    def _names(self, segment: StoredSegment) -> Sequence[str]:
        by_segment = self._by_segment.get(segment.file)
        if by_segment is None:
            by_segment = self._by_segment[segment.file] = {}
            for name in self._file(segment.file).keys():  # noqa: SIM118 - not a dict
                number = name.partition("/")[0]
                if number.isdecimal():
                    by_segment.setdefault(int(number), []).append(name)
        return by_segment.get(segment.id, ())

    def _tensor(self, file: int, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(name)
        except Exception as exc:  # of safetensors
            raise CheckpointError(f"{self._path(file)}: damaged: {exc}") from None
        return tensor

    def _file(self, file: int) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(opened(self._path(file)))
        return self._files[file]

    def _path(self, file: int) -> Path:
        return self.folder / self.manifest.files[file].name

    def _damaged(self, segment: StoredSegment, name: str, spec: Spec) -> CheckpointError:
        return CheckpointError(
            f"{self._path(segment.file)}: damaged: {name} is {spec}, but belongs to elements {segment.start} to "
            f"{segment.stop} of key {segment.key!r}"
        )


def verify(folder: Path) -> Manifest:
    """Read all files of the checkpoint in ``folder``; return its manifest.

    Raises:
        CheckpointError: a file is missing, or is not the one that was written; the message names it.
    """
    manifest = load_manifest(folder)
    for file in manifest.files:
        path = folder / file.name
        found = record_of(path)
        if found.nbytes != file.nbytes:
            raise CheckpointError(f"{path}: damaged: it has {found.nbytes} bytes, and {file.nbytes} were written")
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path}: damaged: its sha256 is {found.sha256}, and {file.sha256} was written")
    _require_segments(folder, manifest)
    return manifest


def _require_segments(folder: Path, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless each segment's value, or what a table has beside its rows, is in its file."""
    with CheckpointReader(folder) as reader:
        by_file = [reader.specs(number) for number in range(len(manifest.files))]
    for store in manifest.stores:
        for segment in store.segments:
            if isinstance(store.specs[segment.key], TableSpec):
                if rest_name(segment.id, NUMBERS) not in by_file[segment.file]:
                    path = folder / manifest.files[segment.file].name
                    raise CheckpointError(f"{path}: damaged: it has nothing of table {segment.key!r}")
                continue
            wanted = DTYPES[store.specs[segment.key].dtype], [segment.stop - segment.start]
            there = by_file[segment.file].get(value_name(segment.id))
            if there != wanted:
                raise CheckpointError(
                    f"{folder / manifest.files[segment.file].name}: damaged: {value_name(segment.id)} is {there}, and "
                    f"the manifest says {wanted}"
                )
