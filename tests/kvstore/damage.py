"""Damage to each field of a file: what is JSON in it, with one field changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvstore.errors import KVStoreError


def error_of(call: Callable[[], Any]) -> str | None:
    """Return the text of this package's error that ``call`` raises; None without."""
    try:
        call()
    except KVStoreError as exc:
        return str(exc)
    return None


def fields(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each field of a JSON value."""
    yield way
    if isinstance(value, dict | list):
        for step in value if isinstance(value, dict) else range(len(value)):
            yield from fields(value[step], (*way, step))


def changed(value: Any, way: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with another value for the field at ``way``."""
    if not way:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = changed(value[way[0]], way[1:], change)
    return copy


ODD: list[Callable[[Any], Any]] = [
    *(
        lambda _, new=new: new
        for new in (None, True, -1, 0, 1, 7, 2**70, 10**400, 1.5, float("nan"), "", "w", "rows", "x" * 99)
    ),
    *(lambda _, new=new: new for new in ([], {}, [[]], [None], {"a": 1}, ["float64"], "float64", "bool", "int64")),
    lambda old: [old],
    lambda old: f"{old}",
    lambda old: old[:-1] if isinstance(old, list | str) else old,
    lambda old: [*old, *old] if isinstance(old, list) else old,
    lambda old: old + 1 if isinstance(old, int) else old,
]
