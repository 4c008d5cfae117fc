"""The reader: values and rows of a running job, at a staleness that is asked for. It changes nothing.

A pull tells each server which version of each segment the reader holds. A server sends only the segments that have
moved on by more rounds than the caller allows. So a value that has not changed costs one small message.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Any

import torch

from kvstore import wire
from kvstore.dynamo import outside_graphs
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, Mismatch, UsageError
from kvstore.job.config import Config
from kvstore.plain import scalar
from kvstore.reading.followed_table import FollowedTable
from kvstore.reading.follower import Follower, Source
from kvstore.reading.held import HeldRows, HeldValue, ReadSegment, RowsOfServer, reads_of, reads_of_rows
from kvstore.reading.reader_session import MOST_ASKED, Ask, ReaderSession
from kvstore.reading.shared_copy import share
from kvstore.rows.row_arguments import Wanted
from kvstore.spec import Key, Spec, check_key, require_same, shorten
from kvstore.table import Table, TableSpec
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.transport.shm.shared_memory import sharing
from kvstore.values import as_output, from_host, spec_of

AT_ONCE = 4  # messages to one server
AGAIN_S = 0.2  # between two questions whether a key has a value


class RowPull:
    """One table's part of a pull of rows."""

    def __init__(self, value: HeldValue, row_ids: Any, out: Any) -> None:
        self._value = value
        what = f"row_sparse_pull of key {value.key!r} by a reader"
        if not isinstance(value.spec, TableSpec):
            raise UsageError(f"{what}: it is {value.spec}, not a table; pull it")
        if row_ids is None:
            raise UsageError(f"{what}: row_ids is missing; pass the ids of rows")
        self._table = value.spec.table
        self._wanted = Wanted(what, self._table)
        self._out = self._wanted.add(row_ids, out)
        self._rows = self._wanted.destination()
        self._versions: set[int] = set()

    def asks(self, slack: int) -> list[Ask]:
        value, ids, table = self._value, self._wanted.ids, self._table
        if slack and value.rows is None:
            value.rows = HeldRows(table)
        held = value.rows if slack else None
        versions = held.look_up(ids, self._rows) if held is not None and len(held) else None
        wide = table.rows is None or table.rows > 2**31
        numbers = {segment.server: segment.id for segment in value.segments}
        return [
            (
                read.server,
                wire.ReadRows,
                {"store": value.store, "id": numbers[read.server], "slack": slack, **read.fields(wide)},
                partial(self._take, read, held),
            )
            for read in reads_of_rows(table, ids, versions, len(numbers))
        ]

    def _take(self, read: RowsOfServer, held: HeldRows | None, reply: wire.RowsRead) -> None:
        self._versions.update(read.take(reply, self._rows, held))

    def result(self) -> Any:
        """Return the rows, written, and note of which rounds they are."""
        if self._versions:
            self._value.pulled = min(self._versions), max(self._versions)
        self._wanted.write(self._rows)
        return self._out


@outside_graphs
class Reader:
    """Reads the values of one store of a running job; ``kvstore.connect`` makes it. One thread at a time uses it.

    Args:
        session: its links.
        store: the name of one of the job's stores.
        max_staleness: see ``pull``.
        root: the scheduler's address, if readers of this host may share what they follow.
    """

    def __init__(
        self, session: ReaderSession, store: str = "1", max_staleness: int = 0, root: str | None = None
    ) -> None:
        self._session = session
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._store = store
        self._slack = _slack(max_staleness)
        self._values: dict[Key, HeldValue] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()
        shares = None if root is None else partial(share, root)
        self._source = Source(self._find, self._keys, self._ask, session, self._lock, shares)

    @classmethod
    def of(
        cls,
        config: Config,
        store: str,
        max_staleness: int,
        timeout: float | None,
        make_transport: Callable[[], Transport] | None = None,
    ) -> Reader:
        """Return a reader that has found its job; see ``kvstore.connect``."""
        slack = _slack(max_staleness)
        session = ReaderSession(
            config,
            make_transport or sharing(links(config), config),
            config.timeout_s if timeout is None else timeout,
        )
        try:
            session.connect()
            session.link()
        except BaseException:
            session.close()
            raise
        return cls(session, store, slack, config.root if config.shm else None)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the links. The job goes on. May be called again."""
        if self._pid != os.getpid():
            return  # in a child after fork they are the parent's
        for follower in list(self._followers):
            follower.close()
        self._session.close()

    def keys(self, *, timeout: float | None = None) -> list[Key]:
        """Return the keys that have values now, in the order in which workers have declared them.

        Args:
            timeout: see ``pull``.
        """
        return self._keys(self._session.deadline(timeout))

    def _keys(self, deadline: float) -> list[Key]:
        names: list[Key] = []
        while True:
            page: list[wire.KeysListed] = []
            self._ask("keys()", (), [(None, wire.ListKeys, self._which(start=len(names)), page.append)], deadline)
            names += page[-1].keys
            if not page[-1].more:
                return names

    def spec(self, key: Key, *, timeout: float | None = None) -> Spec | Table:
        """Return the shape and dtype of an array, or what table ``key`` is.

        Args:
            key: a key.
            timeout: see ``pull``.

        Raises:
            KeyNotInitialized: it has no value yet.
        """
        with self._lock:
            spec = self._find([key], self._session.deadline(timeout))[0].spec
        return spec.table if isinstance(spec, TableSpec) else spec

    def wait_for(self, key: Key | Sequence[Key], *, timeout: float | None = None) -> None:
        """Return when ``key``, or each of a list of keys, has a value.

        Raises:
            DeadlineExceeded: one of them has none after ``timeout`` seconds.
        """
        deadline = self._session.deadline(timeout)
        while True:
            try:
                with self._lock:
                    self._find(_listed(key), deadline)
                return
            except KeyNotInitialized as exc:
                if self._session.now() + AGAIN_S >= deadline:
                    raise DeadlineExceeded(f"wait_for() is not done in time: {exc}") from None
            self._session.pause(AGAIN_S)

    def pull(
        self,
        key: Key | Sequence[Key],
        out: Any = None,
        *,
        max_staleness: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the value of ``key``, or a list with the value of each of several keys.

        Each segment of a value is as one round has left it. A value that is cut over servers has several segments,
        which may be of different rounds; ``rounds`` tells.

        Args:
            key: a key, or a list of keys.
            out: an array to write into, or a list of them; by default new tensors are returned.
            max_staleness: the servers may be so many rounds ahead of what is returned; in stores whose every push is
                an update, so many updates of a segment. By default that of ``connect``.
            timeout: in seconds; by default that of ``connect``.

        Raises:
            KeyNotInitialized: a key has no value yet.
            DeadlineExceeded: servers have not answered in time.
            NodeLost: the job has failed, or has ended.
        """
        keys = _listed(key)
        many = isinstance(key, list | tuple)
        deadline = self._session.deadline(timeout)
        slack = self._slack if max_staleness is None else _slack(max_staleness)
        with self._lock:
            values = self._find(keys, deadline)
            try:
                results = self._pull(values, _outputs(values, out, many), slack, deadline)
            except UsageError:
                # A parameter whose gradients turn out to be sparse gets a table at its first step. Its array, which
                # this reader may have found before, stays as it was, so servers refuse to show it.
                again = self._find(keys, deadline)
                if [value.spec for value in again] == [value.spec for value in values]:
                    raise
                results = self._pull(again, _outputs(again, out, many), slack, deadline)
        return results if many else results[0]

    def row_sparse_pull(
        self,
        key: Key | Sequence[Key],
        out: Any = None,
        row_ids: Any = None,
        *,
        max_staleness: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the rows ``row_ids`` of table ``key``, or a list with rows of each of several tables.

        A pull makes no rows: an id without one gives what its row would begin with. All rows that one server sends in
        one message are of one round.

        Args:
            key: a key, or a list of keys.
            out: an array of shape ``(*row_ids.shape, *row)``; or a ``RowSparse``, which becomes the unique ids, rising,
                and their rows; or a list with one for each key. By default new tensors are returned.
            row_ids: integers, of any shape and order, with duplicates; or a list with such for each key.
            max_staleness: see ``pull``. If it is more than 0, the reader holds up to 256 MiB of rows of each table.
            timeout: see ``pull``.

        Raises:
            UsageError: ``key`` is not a table, or an id cannot be in it.
            Mismatch: ``out`` has another shape or dtype than the rows.
            KVStoreError: see ``pull``.
        """
        keys = _listed(key)
        many = isinstance(key, list | tuple)
        wishes = list(row_ids) if many and isinstance(row_ids, list | tuple) else [row_ids]
        outs = [None] * len(keys) if out is None else list(out) if many and isinstance(out, list | tuple) else [out]
        if not len(keys) == len(wishes) == len(outs):
            raise UsageError(f"{len(keys)} keys, {len(wishes)} row_ids and {len(outs)} outs; give one for each key")
        deadline = self._session.deadline(timeout)
        slack = self._slack if max_staleness is None else _slack(max_staleness)
        with self._lock:
            values = self._find(keys, deadline)
            pulls = [RowPull(value, ids, each) for value, ids, each in zip(values, wishes, outs, strict=True)]
            self._all("row_sparse_pull", keys, [ask for pull in pulls for ask in pull.asks(slack)], deadline)
            results = [pull.result() for pull in pulls]
        return results if many else results[0]

    def follow(
        self,
        state_dict: Mapping[str, Any],
        names: Mapping[str, Key] | Callable[[str], Key] | None = None,
        *,
        strict: bool = True,
        on_update: Callable[[list[str]], object] | None = None,
    ) -> Follower:
        """Return a follower: ``state_dict``'s arrays become each version that the job publishes, when you say so.

            model = reader.follow(module.state_dict())
            model.wait_newer()  # module has the first version
            while serving:
                model.update()  # the newest one: only what has changed comes

        Args:
            state_dict: arrays by name, of the shapes of what is published: torch tensors on any device, numpy arrays.
                Values are converted to their dtypes, as ``load_state_dict`` does.
            names: the key under which each array is published, where it has another name: a dict, which need not have
                all, or a function.
            strict: whether each array must be published. If False, arrays that the first version lacks (buffers of a
                module, tables) stay as they are, in later versions too.
            on_update: called after each update with the names of the arrays that have changed.
        """
        if not state_dict:
            raise UsageError("state_dict has no arrays: pass those that are to follow, by name")
        if (
            names is not None
            and not callable(names)
            and (unknown := [name for name in names if name not in state_dict])
        ):
            raise UsageError(f"names has {shorten(unknown)}, which state_dict lacks")
        renamed = names if callable(names) else {**dict(zip(state_dict, state_dict, strict=True)), **(names or {})}.get
        keys = {name: check_key(renamed(name)) for name in state_dict}
        follower = Follower(state_dict, keys, strict, on_update, self._source)
        self._followers.add(follower)
        return follower

    def open_table(self, key: Key, *, timeout: float | None = None) -> FollowedTable:
        """Return table ``key``, all of its rows, as the newest version has them; wait for it if there is none yet.

            table = reader.open_table("user")
            while serving:
                vectors = table.lookup(ids)
                table.update()  # to the newest version: only the rows come that have changed

        It has the methods of what ``kvstore.open_table`` returns for a directory. To read a few rows of a large table,
        ``row_sparse_pull`` them.

        Args:
            key: of a table.
            timeout: see ``pull``.

        Raises:
            UsageError: ``key`` is an array.
            DeadlineExceeded: the job has published no version with this table in time.
            KVStoreError: see ``pull``.
        """
        deadline = self._session.deadline(timeout)
        self.wait_for(key, timeout=timeout)
        table = self.spec(key, timeout=timeout)
        if not isinstance(table, Table):
            raise UsageError(f"open_table: key {key!r} is {table}, not a table; follow it")
        followed = FollowedTable(key, table, self._source)
        followed.wait_newer(max(0.0, deadline - self._session.now()))
        return followed

    def rounds(self, key: Key) -> tuple[int, int]:
        """Return after which rounds the value of ``key`` is that was pulled last: of its oldest and newest segment.

        For a table it is of the oldest and the newest row that was pulled.

        Raises:
            UsageError: it has not been pulled.
        """
        value = self._values.get(check_key(key))
        if value is None or value.pulled is None:
            raise UsageError(f"key {key!r} has not been pulled by this reader")
        return value.pulled

    # ---- helpers

    def _pull(
        self, values: Sequence[HeldValue], outs: Sequence[torch.Tensor | None], slack: int, deadline: float
    ) -> list[torch.Tensor]:
        """Return the values, each in its output; of the table of a parameter, all rows."""
        tables = {value.key: value.spec.table for value in values if isinstance(value.spec, TableSpec)}
        for key, table in tables.items():
            if table.parameter is None:
                raise UsageError(f"key {key!r} is {table}; read its rows with row_sparse_pull")
        arrays = [value for value in values if value.key not in tables]
        pulls = [
            RowPull(value, torch.arange(tables[value.key].rows or 0, dtype=torch.int64, device="cpu"), out)
            if value.key in tables
            else None
            for value, out in zip(values, outs, strict=True)
        ]
        self._refresh(list(dict.fromkeys(arrays)), slack, deadline)
        asks = [ask for pull in pulls if pull is not None for ask in pull.asks(slack)]
        self._all("pull", list(tables), asks, deadline)
        return [
            _written(value, out) if pull is None else pull.result()
            for value, out, pull in zip(values, outs, pulls, strict=True)
        ]

    def _which(self, **more: Any) -> dict[str, Any]:
        return {"name": self._store, **more}

    def _ask(
        self,
        what: str,
        keys: Sequence[Key],
        asks: Iterable[Ask],
        deadline: float,
        at_once: int = MOST_ASKED,
        late: Callable[[], object] = bool,
    ) -> None:
        if self._session.closed:
            raise UsageError("this reader is closed")
        if self._pid != os.getpid():
            raise UsageError("a reader does not work in a child after fork: connect in the child")
        try:
            self._session.ask(what, keys, asks, deadline, at_once, late)
        except UsageError:
            self._values.clear()  # where keys are may have changed: stores are closed and made
            raise

    def _find(self, keys: Sequence[Key], deadline: float) -> list[HeldValue]:
        """Return what is known of ``keys``; ask the scheduler about those that are new."""
        new = [key for key in dict.fromkeys(keys) if key not in self._values]
        if new:
            found: list[wire.KeysFound] = []
            self._ask("pull", new, [(None, wire.FindKeys, self._which(keys=new), found.append)], deadline)
            self._values.update(_values_of(new, found[-1], self._session.num_servers))
        return [self._values[key] for key in keys]

    def _refresh(self, values: Sequence[HeldValue], slack: int, deadline: float) -> None:
        """Have ``values`` as they are on the servers, give or take ``slack`` rounds."""
        asks: list[Ask] = [
            (read.server, wire.ReadValues, {**read.fields, "slack": slack}, read.take) for read in reads_of(values)
        ]
        self._all("pull", [value.key for value in values], asks, deadline)
        for value in values:
            numbers = [version.number for version in value.versions]
            value.pulled = min(numbers), max(numbers)

    def _all(self, what: str, keys: Sequence[Key], asks: Sequence[Ask], deadline: float) -> None:
        """Ask servers in turn, for a few answers at a time."""
        of_servers: dict[int | None, list[Ask]] = {}
        for ask in asks:
            of_servers.setdefault(ask[0], []).append(ask)
        in_turn = (ask for asked in zip_longest(*of_servers.values()) for ask in asked if ask is not None)
        self._ask(what, keys, in_turn, deadline, AT_ONCE * len(of_servers))


def _slack(max_staleness: int) -> int:
    rounds = scalar(max_staleness)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise UsageError(f"max_staleness={rounds!r} must be a number of rounds, 0 or more")
    return rounds


def _listed(key: Key | Sequence[Key]) -> list[Key]:
    keys = list(key) if isinstance(key, list | tuple) else [key]
    return [check_key(each) for each in keys]


def _values_of(keys: Sequence[Key], found: wire.KeysFound, num_servers: int) -> dict[Key, HeldValue]:
    if len(found.kinds) != len(keys) or any(server >= num_servers for server in found.servers):
        raise Mismatch("the scheduler has answered about other keys, or other servers, than this reader knows")
    specs = [
        Spec(tuple(shape), dtype) if table is None else TableSpec.of(Table.of(table))
        for shape, dtype, table in zip(found.shapes, found.dtypes, found.tables, strict=True)
    ]
    columns = zip(found.ids, found.servers, found.starts, found.stops, strict=True)
    values = {}
    for key, kind, count in zip(keys, found.kinds, found.counts, strict=True):
        segments = [ReadSegment(*next(columns)) for _ in range(count)]
        values[key] = HeldValue(key, specs[kind], found.store, segments)
    return values


def _outputs(values: Sequence[HeldValue], out: Any, many: bool) -> list[torch.Tensor | None]:
    if out is None:
        return [None] * len(values)
    outs = list(out) if many and isinstance(out, list | tuple) else [out]
    if len(outs) != len(values):
        raise UsageError(f"{len(values)} keys and {len(outs)} arrays in out; give one array for each key")
    tensors = list(map(as_output, outs))
    for value, tensor in zip(values, tensors, strict=True):
        require_same(value.key, Spec(value.spec.shape, value.spec.dtype), spec_of(tensor), "out is")
    return list(tensors)


def _written(value: HeldValue, out: torch.Tensor | None) -> torch.Tensor:
    """Return the value, in ``out`` if that is given, else in new memory."""
    if out is None:
        return value.flat.clone().view(value.spec.shape)
    for stream in from_host(value.flat, [out]):
        stream.synchronize()
    return out
