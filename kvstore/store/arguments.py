"""The many shapes of (key, value) arguments, made one: a dict from key to a list of values, one per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.errors import UsageError
from kvstore.spec import Key, check_key, kind_of


def group(key: Any, value: Any) -> dict[Key, list[Any]]:
    """Return ``value`` by key; a key that is listed twice has the values of both.

    Args:
        key: a key, or a list of them.
        value: for a single key an array or a list of arrays; for a list of keys a list with one such entry for each.

    Raises:
        UsageError: keys and values do not match, or something that cannot be a key.
    """
    if not isinstance(key, list | tuple):
        return {check_key(key): _listed(key, value)}
    if not key:
        raise UsageError("an empty list of keys")
    if not isinstance(value, list | tuple) or len(value) != len(key):
        got = f"{len(value)}" if isinstance(value, list | tuple) else f"a single {type(value).__name__}"
        raise UsageError(f"{len(key)} keys need a list of {len(key)} values, not {got}")
    grouped: dict[Key, list[Any]] = {}
    for one, its in zip(key, value, strict=True):
        grouped.setdefault(check_key(one), []).extend(_listed(one, its))
    return grouped


def pairs(key: Any, value: Any, kind: type | None) -> tuple[list[Key], list[Any], type] | None:
    """Return keys, values, and the type of the keys, if they are what most callers have; looks at thousands at once.

    That is: lists of different keys, of one type, which is that of those before them (``kind``), and of a value each.
    None: they are to be looked at one by one, with ``group``, and may be wrong.
    """
    if not isinstance(key, list | tuple) or not isinstance(value, list | tuple) or len(key) != len(value):
        return None
    its = kind_of(key)
    if its is None or kind not in (None, its) or len(set(key)) < len(key):
        return None
    if any(issubclass(one, list | tuple) for one in set(map(type, value))):
        return None
    return list(key), list(value), its


def one_kind(keys: Iterable[Key], kind: type | None) -> type:
    """Return the one type that all ``keys``, and those before them (``kind``), have.

    Raises:
        UsageError: there are two: 3 and '3' would be different keys.
    """
    for key in keys:
        its = str if isinstance(key, str) else int
        if kind is not None and its is not kind:
            raise UsageError(f"a store has keys of one kind, {kind.__name__} here; {key!r} is another")
        kind = its
    return kind or str


def _listed(key: Any, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise UsageError(f"an empty list of values for key {key!r}")
    return list(value)
