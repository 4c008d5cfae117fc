"""A job that continues from a checkpoint: what each store takes from it, and what later checkpoints save of a store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.checkpoint.checkpoint_reader import CheckpointReader
from kvstore.checkpoint.stateful import unpacked
from kvstore.checkpoint.tables import NUMBERS, Rest, shared_out
from kvstore.client.checkpoint_in_progress import SavedStore
from kvstore.client.entries import Entries
from kvstore.client.optimizing import Optimizing
from kvstore.client.plans import RowPlan
from kvstore.client.push_pull import Pushes
from kvstore.client.stored_tables import StoredRows, StoredTables
from kvstore.errors import CheckpointError, Mismatch
from kvstore.optim.states import StateTensors
from kvstore.optim.states_file import require_optimizer
from kvstore.rows.frozen_rows import Page
from kvstore.rows.ids import stripes_of
from kvstore.rows.stripe import STATE
from kvstore.spec import Key, Spec, shorten
from kvstore.table import CODECS, Table, TableSpec

log = logging.getLogger(__name__)

RESIDUALS = "residuals"  # the name, with a store's ordinal, under which a worker saves those of its compression


class Resumed:
    """The checkpoint that a job continues from, as one worker reads it."""

    def __init__(self, folder: Path, rank: int, num_workers: int) -> None:
        self._reader = CheckpointReader(folder)
        self._folder, self._rank = folder, rank
        manifest = self._reader.manifest
        self.number, self.rounds = manifest.number, manifest.rounds  # number, rounds: see ``Manifest``
        self._places = {store.ordinal: place for place, store in enumerate(manifest.stores)}
        self._same = manifest.num_workers == num_workers
        self._first = min(manifest.parts, default=0)  # worker 0, or the lowest rank that was left without it
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
        return ordinal in self._places

    def has(self, ordinal: int, key: Key) -> bool:
        place = self._places.get(ordinal)
        return place is not None and key in self._reader.manifest.stores[place].specs

    def value(self, ordinal: int, key: Key, spec: Spec) -> torch.Tensor:
        """Return the value of ``key``, only to be read."""
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
        return self._reader.pages(self._places[ordinal], key)

    def rests(self, ordinal: int, key: Key) -> list[Rest]:
        """Return what each server had of the table ``key`` beside its rows."""
        return self._reader.rests(self._places[ordinal], key)

    def optimizer(self, ordinal: int) -> str | None:
        return self._reader.manifest.stores[self._places[ordinal]].optimizer

    def states(self, ordinal: int, keys: Iterable[Key]) -> tuple[str | None, StateTensors]:
        place = self._places[ordinal]
        return self._reader.manifest.stores[place].optimizer, self._reader.states(place, keys)

    def shapes(self, ordinal: int) -> dict[Key, tuple[int, ...]]:
        place = self._places.get(ordinal)
        specs = {} if place is None else self._reader.manifest.stores[place].specs
        return {key: spec.shape for key, spec in specs.items()}

    def part(self, name: str, shared: bool) -> Any:
        """Return what was attached as ``name``: one worker's if it is ``shared``, else this worker's; None without."""
        if shared:
            if self._shared is None:
                self._shared = self._read(self._first)
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


class RestoredTables:
    """The tables of a checkpoint, given to the servers of a job that continues from it, however many these are now."""

    def __init__(self, ordinal: int, stored: StoredTables, optimizing: Optimizing) -> None:
        self._ordinal, self._stored, self._optimizing = ordinal, stored, optimizing
        self._without_states: dict[Key, None] = {}

    def put(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers the rows of new tables, and their states if there is an optimizer already."""
        with_states = self._optimizing.optimizer is not None
        new = [table.name(key) for key, table in entries.tables.items() if not resumed.has(self._ordinal, key)]
        if new and resumed.has_store(self._ordinal):
            log.warning("%s has no rows of %s: what init was given is used", resumed, shorten(new))
        for key in [key for key in entries.tables if resumed.has(self._ordinal, key)]:
            resumed.require(self._ordinal, key, entries[key].spec)
            self._put(resumed, key, RowPlan(entries, [key]), with_states)
            if not with_states:
                self._without_states[key] = None

    def put_states(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers, once there is an optimizer, what was without states until then; nobody has pushed yet."""
        for key in [key for key in self._without_states if key in entries]:
            self._put(resumed, key, RowPlan(entries, [key]), with_states=True)
            del self._without_states[key]

    def _put(self, resumed: Resumed, key: Key, plan: RowPlan, with_states: bool) -> None:
        if with_states and (saved := resumed.optimizer(self._ordinal)) is not None:
            require_optimizer(saved, self._optimizing.require("a checkpoint's tables"), str(resumed))
        (table,) = plan.tables
        rests = resumed.rests(self._ordinal, key)
        version, steps = (max(int(rest[NUMBERS][place]) for rest in rests) for place in (0, 1))
        rows_of = np.zeros(plan.servers, np.int64)
        for ids, rows, parts in resumed.pages(self._ordinal, key):
            rows_of += np.bincount(stripes_of(table, ids, plan.servers), minlength=plan.servers)
            kept = {name: part for name, part in parts.items() if with_states or not name.startswith(STATE)}
            self._stored.put("init", plan, key, StoredRows(ids, rows, kept, version, steps if with_states else None))
        self._stored.put_rest("init", plan, key, shared_out(table, rests, rows_of.tolist()))


class TrainedStore:
    """What the checkpoints need of a store."""

    def __init__(
        self,
        ordinal: int,
        entries: Entries,
        optimizing: Optimizing,
        pushes: Pushes,
        stored: StoredTables,
    ) -> None:
        self.ordinal, self.entries, self.optimizing, self.pushes = ordinal, entries, optimizing, pushes
        self.rule, self.requests, self.clocks = pushes.rule, pushes.requests, pushes.clocks
        self.tables = RestoredTables(ordinal, stored, optimizing)  # gives the servers a checkpoint's
        self.begun = 0  # the highest round that this worker has begun
        self.restored: dict[Key, None] = {}  # keys with a checkpoint's values, whose states are not on servers yet
        self.has_residuals = False  # whether the compression has the checkpoint's
        self._trains: bool | None = None

    @property
    def in_step(self) -> bool:
        """Whether all workers make the same rounds."""
        return self.rule.mode == "sync" and self.rule.quorum is None

    @property
    def trains(self) -> bool:
        """Whether the servers update with an optimizer; other stores have nothing to save. Known from a push on."""
        if self._trains is None:
            self._trains = self.optimizing.optimizer is not None or self.requests.optimizer() is not None
        return self._trains

    def optimizer_set(self) -> None:
        self._trains = True

    @property
    def rounds(self) -> int:
        """The highest round that this worker has pushed."""
        return int(self.clocks.pushed[: len(self.entries)].max(initial=0))

    def saved(self) -> SavedStore:
        entries = Entries()
        entries.add(self.entries)
        clocks = self.clocks.pushed[: len(entries)].tolist()
        return SavedStore(self.requests.store, self.ordinal, self.rule.mode, entries, clocks)

    @property
    def compresses(self) -> bool:
        """Whether the compression has residuals, which are this worker's own."""
        return self.pushes.compressing is not None

    @property
    def residuals_name(self) -> str:
        return f"{RESIDUALS}.{self.ordinal}"

    def residuals(self) -> Any:
        how = self.pushes.compressing
        if how is None:
            return None
        self.pushes.flush()  # what is still to be encoded changes the residuals
        return how.state()

    # ---- from a checkpoint

    def first_values(
        self, resumed: Resumed, keys: Sequence[Key], specs: Sequence[Spec], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the first values of ``keys``: the checkpoint's, where it has them, else those given."""
        known = [resumed.has(self.ordinal, key) for key in keys]
        self.restored.update(dict.fromkeys(key for key, has in zip(keys, known, strict=True) if has))
        if not all(known) and resumed.has_store(self.ordinal):
            new = [key for key, has in zip(keys, known, strict=True) if not has]
            log.warning("%s does not have %s: what init was given is used", resumed, shorten(new))
        return [
            resumed.value(self.ordinal, key, spec) if has else value
            for key, spec, value, has in zip(keys, specs, values, known, strict=True)
        ]

    def give_states(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers the checkpoint's states of ``entries``, if there is an optimizer already; once."""
        if self.optimizing.optimizer is None:
            return
        self.tables.put_states(resumed, entries)
        keys = [key for key in self.restored if key in entries]
        if not keys:
            return
        optimizer, states = resumed.states(self.ordinal, keys)
        if optimizer is not None:
            self.optimizing.restore(optimizer, states, entries, str(resumed))
        for key in keys:
            del self.restored[key]

    def give_residuals(self, resumed: Resumed) -> None:
        """Give the compression, before the first push, the checkpoint's residuals of this worker."""
        how = self.pushes.compressing
        if how is None:
            return
        self.has_residuals = True  # before they are taken: what cannot be taken is said once, not at each push
        state = resumed.part(self.residuals_name, shared=False)
        if state is None:
            return
        if not isinstance(state, tuple) or [type(each) for each in state] != [dict, dict]:
            raise CheckpointError(f"{resumed}: damaged: the residuals of a worker are not tensors and options")
        tensors, plain = state
        if plain.get("compression") == how.compression.options():
            how.load_state(tensors, plain, resumed.shapes(self.ordinal))
        else:
            log.warning("%s: the residuals of another compression are left out", resumed)
