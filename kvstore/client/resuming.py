"""The checkpoint that a job continues from, as one worker sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvstore.checkpoint.reader import CheckpointReader
from kvstore.checkpoint.stateful import unpacked
from kvstore.checkpoint.tables import Rest
from kvstore.errors import CheckpointError, Mismatch
from kvstore.optim.states import StateTensors
from kvstore.rows.frozen_rows import Page
from kvstore.spec import Key, Spec
from kvstore.table import CODECS, Table, TableSpec

log = logging.getLogger(__name__)


class Resumed:
    """See the module.

    Args:
        folder: of the checkpoint.
        rank, num_workers: this worker's rank, and how many there are now.

    Attributes:
        number, rounds: see ``Manifest``.
    """

    def __init__(self, folder: Path, rank: int, num_workers: int) -> None:
        self._reader = CheckpointReader(folder)
        self._folder, self._rank = folder, rank
        manifest = self._reader.manifest
        self.number, self.rounds = manifest.number, manifest.rounds
        self._places = {store.ordinal: place for place, store in enumerate(manifest.stores)}
        self._same = manifest.num_workers == num_workers
        self._parts: dict[str, Any] | None = None
        self._shared: dict[str, Any] | None = None
        if not self._same and rank == 0:
            log.warning(
                "%s was saved by %d workers, and there are %d: what each worker added of its own is left out",
                *(folder, manifest.num_workers, num_workers),
            )

    def __str__(self) -> str:
        return str(self._folder)

    def has_store(self, ordinal: int) -> bool:
        """Return whether the ``ordinal``-th store of the job was saved."""
        return ordinal in self._places

    def has(self, ordinal: int, key: Key) -> bool:
        """Return whether the ``ordinal``-th store of the job had ``key``."""
        place = self._places.get(ordinal)
        return place is not None and key in self._reader.manifest.stores[place].specs

    def value(self, ordinal: int, key: Key, spec: Spec) -> torch.Tensor:
        """Return the value of ``key``, only to be read.

        Raises:
            Mismatch: it is of another shape or dtype than ``spec``.
        """
        self.require(ordinal, key, spec)
        return self._reader.value(self._places[ordinal], key)

    def require(self, ordinal: int, key: Key, spec: Spec) -> None:
        """Raise ``Mismatch`` unless ``key`` is what ``spec`` says; tables may travel in another encoding."""
        saved = self._reader.manifest.stores[self._places[ordinal]].specs[key]
        if _plain(saved) != _plain(spec):
            differences = _differences(saved, spec)
            raise Mismatch(
                f"{self._folder}: key {key!r} is {saved} there, but {spec} here{differences}: resume with the model "
                "that was saved"
            )

    def pages(self, ordinal: int, key: Key) -> Iterator[Page]:
        """Yield all rows of the table ``key``."""
        return self._reader.pages(self._places[ordinal], key)

    def rests(self, ordinal: int, key: Key) -> list[Rest]:
        """Return what each server had of the table ``key`` beside its rows."""
        return self._reader.rests(self._places[ordinal], key)

    def optimizer(self, ordinal: int) -> str | None:
        """Return the name of the store's optimizer."""
        return self._reader.manifest.stores[self._places[ordinal]].optimizer

    def states(self, ordinal: int, keys: Iterable[Key]) -> tuple[str | None, StateTensors]:
        """Return the optimizer's name and the states of ``keys``."""
        place = self._places[ordinal]
        return self._reader.manifest.stores[place].optimizer, self._reader.states(place, keys)

    def shapes(self, ordinal: int) -> dict[Key, tuple[int, ...]]:
        """Return the shapes of the arrays of the ``ordinal``-th store."""
        place = self._places.get(ordinal)
        specs = {} if place is None else self._reader.manifest.stores[place].specs
        return {key: spec.shape for key, spec in specs.items()}

    def part(self, name: str, shared: bool) -> Any:
        """Return what was attached as ``name``: worker 0's if it is ``shared``, else this worker's; None without."""
        if shared:
            if self._shared is None:
                self._shared = self._read(0)
            return self._shared.get(name)
        if not self._same:
            return None
        if self._parts is None:
            self._parts = self._read(self._rank)
        return self._parts.get(name)

    def _read(self, rank: int) -> dict[str, Any]:
        part = self._reader.part(rank)
        try:
            state = {} if part is None else unpacked(*part)
        except CheckpointError as exc:
            raise CheckpointError(f"{self._folder}: the part of worker {rank}: {exc}") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{self._folder}: damaged: the part of worker {rank} is not a dict")
        return state


def _plain(spec: Spec) -> Spec:
    """Return ``spec``, of a table without its encoding; older checkpoints do not know whose rows it has."""
    if not isinstance(spec, TableSpec):
        return spec
    return TableSpec.of(Table.of([*spec.table.alone.described[:-1], CODECS[0]]))


def _differences(saved: Spec, spec: Spec) -> str:
    """Say how tables differ whose shapes do not."""
    if not isinstance(saved, TableSpec) or not isinstance(spec, TableSpec) or str(saved) != str(spec):
        return ""
    names = ("init", "scale", "seed", "admit", "evict")
    return "".join(
        f", with {name}={there!r} there and {here!r} here"
        for name in names
        if (there := getattr(saved.table, name)) != (here := getattr(spec.table, name))
    )
