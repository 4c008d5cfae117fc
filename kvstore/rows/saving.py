"""Tables into files and back, whatever the store: what saves needs to be frozen, and what loads needs to be put."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.errors import CheckpointError, DeadlineExceeded, KVStoreError, UsageError
from kvstore.lineage import Version
from kvstore.rows.frozen_rows import FrozenRows, Page
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids
from kvstore.rows.open_table import OpenTable, open_table, require_known
from kvstore.rows.stripe import STATE
from kvstore.rows.table_files import FrozenState, Save, base_of, newest, write_save
from kvstore.spec import Key
from kvstore.table import Table
from kvstore.ticket import Operation, Ticket

log = logging.getLogger(__name__)

PAGE_SLOTS = 1 << 14
# A server keeps four frozen tables of a worker, and thaws the oldest for a fifth: open saves must stay below that, also
# when a save that failed has left one behind.
MOST_OPEN = 2
SHARE = 0.05  # of the time: what a save takes up while no caller waits for it


class Reading(Protocol):
    """Yields all rows of a frozen table, and all ids of rows that have gone, each once."""

    def pages(self, state: bool) -> Iterator[Page]: ...

    def gone_pages(self) -> Iterator[Ids]: ...


class FrozenReading:
    """The reading of tables in this process, in a ``with`` block, whose end thaws them."""

    def __init__(self, stripes: Sequence[FrozenRows]) -> None:
        self._stripes = stripes

    def __enter__(self) -> FrozenReading:
        return self

    def __exit__(self, *_: object) -> None:
        for frozen in self._stripes:
            frozen.thaw()

    def pages(self, state: bool) -> Iterator[Page]:
        for frozen in self._stripes:
            yield from frozen.pages(PAGE_SLOTS, state)

    def gone_pages(self) -> Iterator[Ids]:
        for frozen in self._stripes:
            yield frozen.gone_page(0, frozen.gone)


Freeze = Callable[["Sequence[Version] | None"], "tuple[AbstractContextManager[Reading], FrozenState]"]


class SavePace:
    """Keeps a save to ``SHARE`` of the time, so that training has the rest; ``hurry`` ends that."""

    def __init__(self) -> None:
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """Go on without pauses. Another thread may call it."""
        self._hurried.set()

    def pages(self, pages: Iterator[Page]) -> Iterator[Page]:
        """Yield ``pages``, with a pause after each that is as long as reading and writing one page is to take up."""
        resumed = time.monotonic()
        for page in pages:
            yield page
            self._hurried.wait((time.monotonic() - resumed) * (1 / SHARE - 1))
            resumed = time.monotonic()


class TableSaving(Operation):
    """A save that goes on in a thread. Its result is the version that has been saved. A waiting caller hurries it."""

    def __init__(self, key: Key, write: Callable[[], int], pace: SavePace) -> None:
        super().__init__("save_table", [key])
        self._write = write
        self._pace = pace
        self._thread = threading.Thread(target=self._run, name=f"kvstore save of {key!r}", daemon=True)

    def start(self) -> None:
        self.open.add(0)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.take(self._write())
        except KVStoreError as exc:
            self.fail(exc)
        except Exception as exc:  # nothing is to be lost: the caller raises it
            self.fail(KVStoreError(f"save_table: {type(exc).__name__}: {exc}"))
        finally:
            self.open.clear()

    def end(self, timeout: float | None = None) -> None:
        """Hurry, and return when it has ended or failed, or after ``timeout`` seconds."""
        self._pace.hurry()
        self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> int:
        self.end(timeout)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self} goes on, after {timeout} seconds")
        version: int = super().wait(timeout)
        return version


class OpenSaves:
    """The saves of one store that go on in threads: few at a time, since servers keep few frozen tables."""

    def __init__(self) -> None:
        self._going: list[TableSaving] = []

    def make_room(self) -> None:
        """Return when another may begin; the oldest is hurried if there are too many."""
        self._going = [saving for saving in self._going if not saving.done()]
        while len(self._going) >= MOST_OPEN:
            self._going.pop(0).end()

    def start(self, saving: TableSaving) -> None:
        self._going.append(saving)
        saving.start()


def save_table(
    path: str | os.PathLike[str],
    key: Key,
    table: Table,
    stripes: int,
    since: int | None,
    state: bool,
    freeze: Freeze,
    wait: bool,
    others: OpenSaves,
) -> Ticket:
    """Save a table; see ``KVStore.save_table``.

    Args:
        freeze: given a version of each stripe, or None, returns what reads the frozen table, and what it is. It reads
            all rows if what has changed since is not known; see ``FrozenState.whole``.
        wait: return when it is written. If False, it is written slowly, in a thread; see ``SavePace``.
    """
    directory = Path(path)
    base = None if since is None else base_of(directory, since, key, table, stripes)
    if since is None:
        _require_own(directory, key)
    whole = ""
    if base is not None and state and not base.manifest.parts:
        whole, base = f"version {since} was saved without states", None
    others.make_room()
    reading, frozen = freeze(None if base is None else base.manifest.versions)
    if frozen.whole:
        whole, base = frozen.whole, None
    if whole:  # an error would stop a job that does not watch its saves; a delta would be wrong without a word
        log.warning("save_table of key %r, since=%s: all rows are saved, not only changes: %s", key, since, whole)
    if not state:
        frozen = frozen._replace(parts={}, rule=None)

    pace = SavePace()

    def write() -> int:
        return _written(directory, key, table, reading, frozen, state, base, pace).manifest.version

    if wait:
        pace.hurry()
        done = Operation("save_table", [key])
        done.take(write())
        return Ticket(done)
    saving = TableSaving(key, write, pace)
    others.start(saving)
    return Ticket(saving)


def _require_own(directory: Path, key: Key) -> None:
    """Raise ``UsageError`` if ``directory`` has saves of another table: a reader would get the last save of either."""
    try:
        saved = newest(directory).manifest.key
    except (CheckpointError, OSError):  # none, or an unreadable one
        return
    if saved != key:
        raise UsageError(f"{directory} has saves of table {saved!r}; save {key!r} to a directory of its own")


def _written(
    directory: Path,
    key: Key,
    table: Table,
    reading: AbstractContextManager[Reading],
    frozen: FrozenState,
    state: bool,
    base: Save | None,
    pace: SavePace,
) -> Save:
    with reading as read:
        gone = () if base is None else read.gone_pages()
        try:
            return write_save(directory, key, table, frozen, pace.pages(read.pages(state)), gone, base)
        except OSError as exc:
            raise UsageError(f"{directory}: key {key!r} cannot be saved there: {exc.strerror or exc}") from exc


def load_table(
    path: str | os.PathLike[str],
    key: Key,
    table: Table,
    rule: str | None,
    put: Callable[[Page, int, int], None],
) -> None:
    """Load a table; see ``KVStore.load_table``.

    Args:
        rule: of the store's optimizer; states of another are left out. None for none.
        put: called with each page, and with how many updates the table, and its optimizer, have had.
    """
    opened: OpenTable = open_table(path, verify=True)
    require_known(opened, key, table)
    manifest = opened.manifest
    with_states = manifest.rule is not None and manifest.rule == rule
    steps = max(manifest.steps) if with_states else 0
    nothing = np.empty(0, np.int64), np.empty((0, table.width), array_dtype(table.dtype))
    pages = iter(opened.pages())
    for page in itertools.chain([next(pages, Page(*nothing, {}))], pages):  # versions count without rows, too
        parts = {name: part for name, part in page.parts.items() if with_states or not name.startswith(STATE)}
        put(page._replace(parts=parts), opened.version, steps)
