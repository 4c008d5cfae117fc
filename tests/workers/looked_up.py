"""Which rows of one table a batch needs."""

from __future__ import annotations

from typing import Any

from kvstore.table import Table
from workers.embedding.lookups import Lookup, TableIds, look_up_all


def look_up(key: Any, table: Table, given: Any, padding: int | None = None) -> Lookup:
    """What ``look_up_all`` returns for one table."""
    (lookup,) = look_up_all([TableIds(key, table, given, padding)])
    return lookup
