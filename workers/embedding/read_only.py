"""``ReadOnlyTables``: what modules take for a store where their rows are only read, so that a model is written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore import FollowedTable, KVStore, Mismatch, OpenTable, Reader, Unsupported, UsageError
from kvstore.spec import Key
from kvstore.store.base import TableChanges
from kvstore.table import Table


class ReadOnlyTables(KVStore):
    """A store of which the tables are those of a reader, or open ones by key. All else is ``Unsupported``."""

    def __init__(self, source: Reader | Mapping[Key, OpenTable | FollowedTable]) -> None:
        super().__init__("read-only")
        self._source = source

    def init(self, key: Any, value: Any) -> None:
        there = self._source.spec(key) if isinstance(self._source, Reader) else self._opened(key).table
        if not isinstance(there, Table) or (there.rows, there.row, there.dtype) != (value.rows, value.row, value.dtype):
            raise Mismatch(f"the module of key {key!r} is for {value}, but what is read there is {there}")

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, *, wait: bool = True
    ) -> None:
        """Write the rows ``row_ids`` of several tables into the tensors ``out``; returns when they are there."""
        if isinstance(self._source, Reader):
            self._source.row_sparse_pull(key, out, row_ids)
            return
        for one, ids, target in zip(key, row_ids, out, strict=True):
            target.copy_(self._opened(one).lookup(ids))

    def table_changes(self, key: Any) -> TableChanges:
        return TableChanges(0 if isinstance(self._source, Reader) else self._opened(key).version, 0)

    @property
    def rescale_grad(self) -> float:  # what a push asks for first
        raise Unsupported("tables that are only read cannot be trained: make their modules with a store")

    def _opened(self, key: Key) -> OpenTable | FollowedTable:
        if isinstance(self._source, Reader) or key not in self._source:
            there = [] if isinstance(self._source, Reader) else list(self._source)
            raise UsageError(f"there is no table {key!r} among the ones to read: {there}")
        return self._source[key]


def as_store(given: Any) -> KVStore:
    """Return what a module was ``given`` as a store.

    Raises:
        UsageError: it is neither a store, nor a reader, nor open tables by key.
    """
    if isinstance(given, KVStore):
        return given
    tables = isinstance(given, Mapping) and all(isinstance(each, OpenTable | FollowedTable) for each in given.values())
    if tables or isinstance(given, Reader):
        return ReadOnlyTables(given)
    raise UsageError(
        f"store={given!r:.200} must be a KVStore, which modules may share: pass store=kvstore.create('dist_sync'). To "
        "read rows only, pass a reader, or a dict of what kvstore.open_table returns, by key"
    )
