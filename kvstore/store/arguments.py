"""(key, value) arguments in any of their forms, as a dict from key to a list of values, one per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.errors import UsageError
from kvstore.spec import Key, check_key, kind_of


def group(key: Any, value: Any) -> dict[Key, list[Any]]:
    """Return the list of values of each key. A key that is listed twice gets the values of both.

    Args:
        key: a key, or a list of them.
        value: for a single key an array or a list of arrays; for a list of keys a list with one such entry for each.

    Raises:
        UsageError: keys and values do not match, or a key is neither an int nor a str.
    """
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
    """Return the one type that all ``keys`` have, and the store's earlier keys (``kind``).

    Raises:
        UsageError: there are two types: 3 and '3' would be different keys.
    """
    for key in keys:
        key_type = str if isinstance(key, str) else int
        if kind is not None and key_type is not kind:
            raise UsageError(f"a store has keys of one kind, {kind.__name__} here; {key!r} is another")
        kind = key_type
    return kind or str


def _listed(key: Any, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise UsageError(f"the list of values for key {key!r} is empty: pass one value per device")
    return list(value)
