"""Which rows of one table a call wants: its requests, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.errors import UsageError
from kvstore.rows.row_arguments import Wanted, row_sparse
from kvstore.spec import Key
from kvstore.store.arguments import ROUND, RowRequest
from kvstore.table import Table


def described(call: str, key: Key, rank: int) -> str:
    """Return what messages say of a call: its key and its worker."""
    return f"{call} of key {key!r} by worker {rank}"


def wanted_rows(
    call: str,
    key: Key,
    rank: int,
    table: Table,
    requests: Sequence[RowRequest],
    pushed: Sequence[Any] | None = None,
) -> Wanted:
    """Return which rows ``requests`` want. Outputs that they lack are made, or are what is pushed."""
    what = described(call, table.name(key), rank)
    wanted = Wanted(what, table)
    for position, request in enumerate(requests):
        if request.ids is not None and not isinstance(request.ids, str):
            request.out = wanted.add(request.ids, request.out)
            continue
        if pushed is None or request.ids not in (None, ROUND):
            valid = "" if pushed is None else f", or {ROUND!r}"
            raise UsageError(f"{what}: row_ids is {request.ids!r}; pass the ids of rows{valid}")
        if position >= len(pushed):
            raise UsageError(f"{what}: {position + 1} outs without row_ids need as many values, not {len(pushed)}")
        value = row_sparse(what, pushed[position], table)
        out = value if request.out is None else request.out
        request.out = wanted.add(value.ids if request.ids is None else None, out)
    return wanted
