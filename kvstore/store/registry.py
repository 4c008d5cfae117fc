"""The names of stores: built-in ones, and those that programs have registered. Imports no store."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstore.errors import UnknownName, UsageError, meant
from kvstore.plain import scalar


class Builtin(NamedTuple):
    """Where the class of a built-in store is. ``canonical`` is the name that all its names are aliases of."""

    module: str
    cls: str
    canonical: str


_BUILTIN = {
    name: Builtin(module, cls, names[0])
    for module, cls, names in (
        ("kvstore.store.local", "LocalStore", ("local", "local_update_cpu", "local_allreduce_cpu")),
        ("kvstore.store.local", "DeviceStore", ("device", "local_allreduce_device")),
        ("kvstore.client", "DistStore", ("dist_sync", "dist")),
        ("kvstore.client", "DistStore", ("dist_device_sync", "dist_sync_device")),
        ("kvstore.client", "DistStore", ("dist_async", "dist_async_device", "dist_device_async")),
        ("kvstore.client", "DistStore", ("dist_ssp", "dist_ssp_device", "dist_device_ssp")),
    )
    for name in names
}
REGISTERED: dict[str, Callable[..., Any]] = {}  # by programs


def register(name: str, make: Callable[..., Any]) -> None:
    """Let ``name``, in lower case, mean the store that ``make`` returns. Warn if the name is taken."""
    if name in store_names():
        warnings.warn(f"the new store {name!r} replaces the one of that name", stacklevel=3)
    REGISTERED[name] = make


def find(name: str) -> Builtin | Callable[..., Any]:
    """Return what makes the store called ``name``, in upper or lower case."""
    lowered = name.lower()
    if lowered in REGISTERED:
        return REGISTERED[lowered]
    if lowered not in _BUILTIN:
        raise UnknownName(f"no store {name!r}; choose from {', '.join(store_names())}{meant(lowered, store_names())}")
    return _BUILTIN[lowered]


def canonical(name: str) -> str:
    """Return the name that ``name`` is an alias of; itself, if it is of no built-in store."""
    builtin = _BUILTIN.get(name.lower())
    return name if builtin is None else builtin.canonical


def store_names() -> list[str]:
    return [*_BUILTIN, *sorted(REGISTERED)]


def require_options(name: str, options: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    """Raise ``UnknownName`` if one of ``options`` is not among the ``valid`` ones."""
    for option in options:
        if option not in valid:
            raise UnknownName(
                f"a {name!r} store has no option {option!r}"
                + (f"; choose from {', '.join(valid)}{meant(option, valid)}" if valid else "; it has none")
            )


def flag(name: str, value: Any) -> bool:
    """Return option ``name``, which is on or off. None counts as not given, which is off."""
    value = scalar(value)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} must be True or False")
    return bool(value)
