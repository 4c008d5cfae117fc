"""A saved table, read without servers: rows by id, for serving, and page by page. Files are mapped into memory.

Several processes on a host share the memory. Nothing in the files is trusted: a damaged one gives an error, or wrong
rows; ``verify`` finds either.
"""

from __future__ import annotations

import abc
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.dynamo import outside_graphs
from kvstore.errors import CheckpointError, DeadlineExceeded, UsageError
from kvstore.job.files import require_plain
from kvstore.rows.admission import write_beginnings
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import array_dtype, tensor_of_rows
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.index import Entries, probe
from kvstore.rows.slabs import Array, Slots, scatter
from kvstore.rows.table_files import GONE, IDS, INDEX, ROWS, Save, TableManifest, load_manifest, newest
from kvstore.sealed_folders import record_of
from kvstore.spec import Key
from kvstore.table import Table

PAGE = 1 << 14  # rows that are read at a time
LOOK_S = 0.1  # between two looks whether a directory has another save
MAX_CHAIN = 10_000  # deltas that continue each other; forged manifests could lead on for ever


@outside_graphs
def open_table(directory: str | os.PathLike[str], verify: bool = False) -> OpenTable:
    """Open the last save of a table in ``directory``, which ``save_table`` wrote: deltas with all that they continue.

    ``Reader.open_table`` returns the same of a running job.

    Args:
        directory: the same as for ``save_table``; or the folder of one save in it.
        verify: read all files, and compare them with their sha256.

    Raises:
        CheckpointError: there is no whole save, or a file is missing or damaged.
    """
    opened = OpenTable(_chain(Path(directory), ()), Path(directory))
    if verify:
        opened.verify()
    return opened


def _chain(path: Path, known: Sequence[SavedRows]) -> list[SavedRows]:
    """Return the save at ``path`` and those that it continues, the last first; those that are ``known`` stay open."""
    open_now = {(saved.folder, saved.sha256): saved for saved in known}
    save = Save(path, *load_manifest(path)) if path.name.startswith("save-") else newest(path)
    chain = [open_now.get((save.folder, save.sha256)) or SavedRows(save)]
    while (base := chain[-1].manifest.base) is not None:
        folder = save.folder.parent / base.folder
        same = open_now.get((folder, base.sha256))
        older = Save(folder, *load_manifest(folder)) if same is None else Save(folder, same.manifest, same.sha256)
        if older.sha256 != base.sha256 or older.manifest.table != save.manifest.table:
            raise CheckpointError(f"{folder} is not the save that {chain[-1].folder} continues")
        if older.manifest.lineages != save.manifest.lineages:
            raise CheckpointError(
                f"{folder} is of another course of the table than {chain[-1].folder}, which is said to continue it"
            )
        if len(chain) == MAX_CHAIN or folder.name >= chain[-1].folder.name:
            raise CheckpointError(f"{save.folder}: the saves that it continues do not end")
        chain.append(same or SavedRows(older))
    return chain


class ReadableRows(abc.ABC):
    """The rows of a table as some version has them: of a directory, or of a running job."""

    def __init__(self, key: Key, table: Table) -> None:
        self.key, self.table = key, table
        self.changed: torch.Tensor | None = None

    @property
    @abc.abstractmethod
    def version(self) -> int: ...

    @abc.abstractmethod
    def _read(self, ids: Ids, out: Array) -> Slots:
        """Write rows to ``out``; return the positions of the ids that have none."""

    def __repr__(self) -> str:
        shape = ", ".join(map(str, ["*" if self.table.rows is None else self.table.rows, *self.table.row]))
        return f"<{type(self).__name__} {self.key!r} of {self.table.dtype}[{shape}], version {self.version}>"

    def lookup(self, ids: Any) -> torch.Tensor:
        """Return the rows of ``ids``.

        An id without a row, or whose row has gone, gives what a pull would have given: its initial value, or zeros in a
        table with an admission rule.

        Args:
            ids: integers of any shape, in any order; they may repeat.

        Returns:
            A new tensor, of shape ``(*ids.shape, *row)``.

        Raises:
            UsageError: the ids are not integers, or the table can have no such row.
        """
        wanted = require_ids(f"ids of table {self.key!r}", ids, self.table)
        flat = wanted.reshape(-1)
        out = np.empty((len(flat), self.table.width), array_dtype(self.table.dtype))
        missing = self._read(flat, out)
        if len(missing) and self.table.admit is not None:
            out[missing] = 0
        elif len(missing):
            begun = np.empty((len(missing), self.table.width), out.dtype)
            write_beginnings(self.table, flat[missing], begun)
            scatter(out, missing, begun)
        return tensor_of_rows(out).view(*wanted.shape, *self.table.row)


@outside_graphs
class OpenTable(ReadableRows):
    """A saved table that is read without servers, for serving. Made by ``open_table``. Any thread may use it.

    Args:
        chain: the files of the save, and of those that it continues, the last first.
        directory: where they are.

    Attributes:
        key: of the table.
        table: what it is.
        changed: the ids of the rows that the last ``update`` has changed, or that have gone with it, as an int64 tensor
            without order, where some may be twice. None: it may be any, as after opening.
    """

    def __init__(self, chain: list[SavedRows], directory: Path) -> None:
        self._chain = chain  # the last save first; it is replaced as one, so each call of a thread is of one save
        self._directory = directory
        super().__init__(self.manifest.key, self.manifest.table)

    @property
    def manifest(self) -> TableManifest:
        """Of the last save."""
        return self._chain[0].manifest

    @property
    def version(self) -> int:
        """How many updates the table had had."""
        return self.manifest.version

    def update(self) -> bool:
        """Have the last save of the directory now; return whether it is another one than before.

        Of deltas, only the files that are new are opened. Where it fails, the table stays as it was.

        Raises:
            CheckpointError: see ``open_table``; or the last save is of another table.
        """
        chain = _chain(self._directory, self._chain)
        if (chain[0].manifest.key, chain[0].manifest.table) != (self.key, self.table):
            raise CheckpointError(f"{chain[0].folder} is not a save of {self!r}: open it by itself")
        before, self._chain = self._chain[0], chain
        if chain[0] is before:
            return False
        news = list(itertools.takewhile(lambda saved: saved is not before, chain))
        ids = [part for saved in news for part in (saved.ids, saved.gone)]
        self.changed = torch.from_numpy(np.concatenate(ids)) if len(news) < len(chain) else None
        return True

    def wait_newer(self, timeout: float = 60.0) -> int:
        """Return when the directory has another save, and the rows are of it: its ``version``.

        Args:
            timeout: in seconds.

        Raises:
            DeadlineExceeded: there was none in time.
            CheckpointError: see ``update``.
        """
        deadline = time.monotonic() + timeout
        while not self.update():
            if time.monotonic() + LOOK_S > deadline:
                raise DeadlineExceeded(
                    f"{self._directory} has had no save after version {self.version} in {timeout:g} s"
                )
            time.sleep(LOOK_S)
        return self.version

    def _read(self, ids: Ids, out: Array) -> Slots:
        left = np.arange(len(ids))  # positions of ids that have not been found
        absent = []
        for saved in self._chain:
            found = saved.find(ids[left])
            there = found >= 0
            if len(left) == len(ids) and there.all():
                saved.rows.take(found, axis=0, out=out, mode="clip")
                left = left[:0]
                break
            scatter(out, left[there], saved.rows.take(found[there], axis=0, mode="clip"))
            left = left[~there]
            gone = saved.has_gone(ids[left])
            absent.append(left[gone])
            left = left[~gone]
        return np.concatenate([left, *absent])

    def has(self, ids: Any) -> torch.Tensor:
        """Return for each of ``ids`` whether it has a row that was saved, as a tensor of bool of the same shape."""
        wanted = require_ids(f"ids of table {self.key!r}", ids, self.table)
        left, there = wanted.reshape(-1), np.zeros(wanted.size, bool)
        undecided = np.arange(wanted.size)
        for saved in self._chain:
            found = saved.find(left) >= 0
            there[undecided[found]] = True
            undecided, left = undecided[~found], left[~found]
            gone = saved.has_gone(left)
            undecided, left = undecided[~gone], left[~gone]
        return torch.from_numpy(there.reshape(wanted.shape))

    def pages(self, count: int = PAGE, state: bool = True) -> Iterator[Page]:
        """Yield all rows that were saved, each once, up to ``count`` at a time, with their states.

        Of a table with a shape these are rows that a push or ``put_rows`` had changed, and perhaps others.
        ``whole_pages`` also has those that nobody had changed. Rows are arrays of numpy, which lacks bfloat16: of such
        a table they are int16 with its bits, and ``torch.from_numpy(page.rows).view(torch.bfloat16)`` has the numbers.

        Args:
            count: of rows.
            state: whether to read states. A row that an older save has under other names of states has none.
        """
        chain = self._chain
        for depth, saved in enumerate(chain):
            kinds = chain[0].manifest.parts
            names = [name for name in saved.parts if state and kinds.get(name) == saved.manifest.parts[name]]
            for start in range(0, saved.manifest.rows, count):
                part = slice(start, start + count)
                ids = np.array(saved.ids[part])
                kept = np.ones(len(ids), bool)
                for newer in chain[:depth]:
                    kept &= (newer.find(ids) < 0) & ~newer.has_gone(ids)
                rows = np.flatnonzero(kept)
                if len(rows):
                    parts = {name: np.array(saved.parts[name][part][rows]) for name in names}
                    yield Page(ids[rows], np.array(saved.rows[part][rows]), parts)

    def verify(self) -> None:
        """Compare all files with their sha256.

        Raises:
            CheckpointError: one is damaged; the message names it.
        """
        for saved in self._chain:
            saved.verify()

    def __len__(self) -> int:
        """How many rows there are; of a chain of deltas, they are counted."""
        if len(self._chain) == 1:
            return self.manifest.rows
        return sum(len(page.ids) for page in self.pages(state=False))


class SavedRows:
    """The files of one save, mapped into memory.

    Raises:
        CheckpointError: a file is missing, or has another size than the manifest says.
    """

    def __init__(self, save: Save) -> None:
        self.folder, self.manifest, self.sha256 = save
        count, table = save.manifest.rows, save.manifest.table
        self._sizes = {file.name: file.nbytes for file in save.manifest.files}
        self.ids: Ids = self._mapped(f"{IDS}.int64", (count,))
        self.rows: Array = self._mapped(f"{ROWS}.{table.dtype}", (count, table.width))
        self._entries: Entries = self._mapped(f"{INDEX}.int32", (self._sizes[f"{INDEX}.int32"] // 4,))
        self.gone: Ids = self._mapped(f"{GONE}.int64", (save.manifest.gone,))
        self.parts = {
            name: self._mapped(f"{name}.{dtype}", (count, columns) if columns else (count,))
            for name, (dtype, columns) in save.manifest.parts.items()
        }

    def find(self, ids: Ids) -> Entries:
        """Return the row number of each id, below 0 where this save has none."""
        return probe(self._entries, self.ids, ids)

    def has_gone(self, ids: Ids) -> Array:
        """Return for each id whether this save says that its row has gone."""
        if not len(self.gone):
            return np.zeros(len(ids), bool)
        gone: Array = self.gone.take(np.searchsorted(self.gone, ids), mode="clip") == ids
        return gone

    def verify(self) -> None:
        for file in self.manifest.files:
            path = self.folder / file.name
            if record_of(path) != file:
                raise CheckpointError(f"{path}: damaged: its sha256 is not that of the manifest")
        if not np.array_equal(self.find(self.ids), np.arange(self.manifest.rows)):
            raise CheckpointError(f"{self.folder}: damaged: the index does not lead to each row")
        if (self.gone[1:] <= self.gone[:-1]).any():
            raise CheckpointError(f"{self.folder}: damaged: the ids of rows that have gone do not rise")

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Array:
        path = self.folder / name
        dtype = array_dtype(name.rpartition(".")[2]).newbyteorder("<")
        try:
            require_plain(path)
            size = path.stat().st_size
            if size != self._sizes[name]:
                raise CheckpointError(f"{path}: damaged: it has {size} bytes, the manifest says {self._sizes[name]}")
            if not size:
                return np.empty(shape, dtype)
            # A plain array over the mapping: numpy's memmap does much with every slice.
            return np.asarray(np.memmap(path, dtype, "r", shape=shape))
        except OSError as exc:
            raise CheckpointError(f"{path}: missing or unreadable ({exc.strerror})") from None


def whole_pages(table: Table, pages: Iterable[Page], count: int) -> Iterator[Page]:
    """Yield the rows of a table, each once: ``pages``, and, if it has a shape, the rows that are not in them.

    Those are as they begin, and have no states. Whoever writes a saved table for others reads it by this.
    """
    saved = np.zeros(table.rows or 0, bool)
    for page in pages:
        if table.rows is not None:
            saved[page.ids] = True
        yield page
    others = np.flatnonzero(~saved)
    for start in range(0, len(others), count):
        ids = others[start : start + count]
        rows = np.empty((len(ids), table.width), array_dtype(table.dtype))
        write_beginnings(table, ids, rows)
        yield Page(ids, rows, {})


def require_known(opened: OpenTable, key: Key, table: Table) -> None:
    """Check that what is loaded into ``key`` was saved from such a table: of the same row, dtype and kind."""
    saved = opened.table
    if (saved.rows, saved.row, saved.dtype) != (table.rows, table.row, table.dtype):
        raise UsageError(f"key {key!r} is {table}, but what is loaded is {saved}")
