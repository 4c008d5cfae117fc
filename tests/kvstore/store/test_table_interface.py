"""The tables' part of the interface, for a store that has none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvstore as kv


class NoTables(kv.KVStore):
    pass


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda store: store.row_sparse_pull("t", row_ids=[1]), "row_sparse_pull"),
        (lambda store: store.pushpull("t", 1.0, row_ids=[1]), "pushpull with row_ids"),
        (lambda store: store.put_rows("t", 1.0), "put_rows"),
        (lambda store: store.table_rows("t"), "table_rows"),
        (lambda store: store.evict("t"), "evict"),
        (lambda store: store.table_statistics("t"), "table_statistics"),
        (lambda store: store.save_table("t", "dir"), "save_table"),
        (lambda store: store.load_table("t", "dir"), "load_table"),
    ],
)
def test_a_store_without_tables_says_so(call: Callable[[kv.KVStore], Any], what: str) -> None:
    with pytest.raises(NotImplementedError, match=f"a 'notables' store has no {what}"):
        call(NoTables())
