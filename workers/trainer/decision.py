"""Where a Trainer's updates happen: Gluon's table."""

from __future__ import annotations

import kvstore as kv
from kvstore import KVStore, UsageError
from kvstore.config import Config


def decide(store: KVStore | str | None, wanted: bool | None, one_device: bool) -> tuple[KVStore | None, bool]:
    """Return the store to use, if any, and whether it updates.

    Args:
        store: a store, the name of one, or None.
        wanted: what the user has said; None leaves it to the table.
        one_device: whether this process trains on one device only.

    Raises:
        UsageError: an async store that is not to update; or several devices without a store.
    """
    made = kv.create(store) if isinstance(store, str) else store
    if made is None and not one_device:
        raise UsageError("several devices need a store to sum their gradients; pass kvstore='device'")
    if made is None:
        return None, False
    is_async = any(word in made.type for word in ("async", "ssp"))
    if wanted is False and is_async:
        raise UsageError(f"a {made.type!r} store updates for every push; update_on_kvstore=False cannot be")
    if wanted is not None:
        return made, wanted
    if is_async:
        return made, True
    if one_device and made.num_workers == 1 and not made.type.startswith("dist"):
        return None, False
    return made, Config.from_env().update_on_kvstore and made.is_capable("optimizer")
