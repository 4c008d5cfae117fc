"""(key, value) arguments in any of their forms, as a dict from key to a list of values, one per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvstore.errors import UsageError
from kvstore.spec import Key, check_key, kind_of


def group(key: Any, value: Any) -> dict[Key, list[Any]]:
    """Return the list of values of each key. A key that is listed twice gets the values of both."""
    if not isinstance(key, list | tuple):
        return {check_key(key): _listed(key, value)}
    if not key:
        raise UsageError("the list of keys is empty: pass at least one key")
    if not isinstance(value, list | tuple) or len(value) != len(key):
        got = f"{len(value)}" if isinstance(value, list | tuple) else f"a single {type(value).__name__}"
        raise UsageError(f"{len(key)} keys need a list of {len(key)} values, not {got}")
    grouped: dict[Key, list[Any]] = {}
    for each_key, its_values in zip(key, value, strict=True):
        grouped.setdefault(check_key(each_key), []).extend(_listed(each_key, its_values))
    return grouped


def pairs(key: Any, value: Any, kind: type | None) -> tuple[list[Key], list[Any], type] | None:
    """The fast path for lists of many keys: return the keys, their values, and the type of the keys.

    It takes lists of different keys of one type, ``kind`` if that is given, with one value each.
    Return None for anything else: not on the fast path, validate fully with ``group``.
    """
    if not isinstance(key, list | tuple) or not isinstance(value, list | tuple) or len(key) != len(value):
        return None
    key_type = kind_of(key)
    if key_type is None or kind not in (None, key_type) or len(set(key)) < len(key):
        return None
    if any(issubclass(value_type, list | tuple) for value_type in set(map(type, value))):
        return None
    return list(key), list(value), key_type


def one_kind(keys: Iterable[Key], kind: type | None) -> type:
    """Return the one type that all ``keys`` have, and the store's earlier keys (``kind``)."""
    for key in keys:
        key_type = str if isinstance(key, str) else int
        if kind is not None and key_type is not kind:
            raise UsageError(
                f"a store has keys of one kind, {kind.__name__} here, and {key!r} is {key_type.__name__}: make another "
                "store for it"
            )
        kind = key_type
    return kind or str


def _listed(key: Any, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise UsageError(f"the list of values for key {key!r} is empty: pass one value per device")
    return list(value)


ROUND = "round"  # in place of ids: those that any worker has pushed in the round


@dataclass(eq=False)
class RowRequest:
    """One array of ids whose rows are wanted, and what they are written into."""

    # as given; None for the rows that the same call pushes, and for a key that has an array; ``ROUND`` for all rows
    # that the same round changes
    ids: Any
    out: Any  # as given. None is to be replaced by a new tensor; where ``ids`` is None or ``ROUND``, by what is pushed.


@dataclass(frozen=True)
class RowRequests:
    """All rows that a call wants."""

    by_key: dict[Key, list[RowRequest]]  # the requests of each key
    listed: list[list[RowRequest]]  # the requests of each key that was listed, in that order; of one key or several
    single: bool  # whether the call was about one key, not about a list
    made: bool  # whether the call gave nothing to write into, so that it returns what is made for it

    def result(self) -> Any:
        """Return what the call returns: what was made for it, in the form of its arguments."""
        if not self.made:
            return None
        outs = [each[0].out if len(each) == 1 else [request.out for request in each] for each in self.listed]
        return outs[0] if self.single else outs


def requests_of(key: Any, out: Any, row_ids: Any) -> RowRequests:
    """Return which rows a call wants."""
    if row_ids is None:
        raise UsageError("row_ids is missing: pass the ids of the rows to pull; pull(key, out) is for whole arrays")
    single = not isinstance(key, list | tuple)
    keys = [key] if single else key
    if not keys:
        raise UsageError("the list of keys is empty: pass at least one key")
    ids_of = _one_each(keys, single, row_ids, "row_ids")
    outs_of = [None] * len(keys) if out is None else _one_each(keys, single, out, "outs")
    by_key: dict[Key, list[RowRequest]] = {}
    listed = []
    for each_key, its_ids, its_outs in zip(keys, ids_of, outs_of, strict=True):
        requests = _row_requests(check_key(each_key), its_ids, its_outs)
        by_key.setdefault(each_key, []).extend(requests)
        listed.append(requests)
    return RowRequests(by_key, listed, single, out is None)


def array_outs(key: Key, requests: list[RowRequest], values: list[Any]) -> list[Any]:
    """Return what the array of ``key`` is written into, in a call that may be about tables, too."""
    for request in requests:
        if request.ids is not None:
            raise UsageError(f"key {key!r} has an array, and no rows: its row_ids must be None")
    if all(request.out is None for request in requests):
        for request in requests:
            request.out = values[0]
        return values
    return [request.out for request in requests]


def _one_each(keys: Any, single: bool, given: Any, what: str) -> list[Any]:
    if single:
        return [given]
    if not isinstance(given, list | tuple) or len(given) != len(keys):
        got = f"{len(given)}" if isinstance(given, list | tuple) else f"a single {type(given).__name__}"
        raise UsageError(f"{len(keys)} keys need a list of {len(keys)} {what}, not {got}")
    return list(given)


def _row_requests(key: Key, ids: Any, out: Any) -> list[RowRequest]:
    """Return the requests of one key; a list of arrays of ids has one for each of the outs."""
    if not isinstance(ids, list | tuple) and not isinstance(out, list | tuple):  # the usual case
        return [RowRequest(ids, out)]
    several = isinstance(ids, list | tuple) and any(getattr(each, "shape", ()) for each in ids)
    all_ids = list(ids) if several else [ids]
    if out is None:
        return [RowRequest(each, None) for each in all_ids]
    outs = _listed(key, out)
    if len(all_ids) == 1:
        all_ids *= len(outs)
    if len(outs) != len(all_ids):
        raise UsageError(f"key {key!r}: {len(outs)} outs need one row_ids or {len(outs)}, not {len(all_ids)}")
    return [RowRequest(*each) for each in zip(all_ids, outs, strict=True)]
