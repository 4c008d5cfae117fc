"""Where a Trainer's updates happen: Gluon's table. And whether gradients are pushed during backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

import kvstore as kv
from kvstore import AlreadyInitialized, KVStore, UsageError
from kvstore.job.config import Config
from kvstore.store.registry import Builtin, find
from workers.common.buckets import divide
from workers.trainer.arrivals import require_waiting
from workers.trainer.overlap import Overlap
from workers.trainer.parameters import Parameter
from workers.trainer.rates import Rates

_updating: weakref.WeakSet[KVStore] = weakref.WeakSet()  # the stores that have a Trainer's optimizer


def opened(store: KVStore | str | None, check_finite: bool) -> KVStore | None:
    """Return a new store if ``store`` is the name of one; those that kvstore has itself check values if asked to."""
    if not isinstance(store, str):
        return store
    checks = {"check_finite": True} if check_finite and isinstance(find(store), Builtin) else {}
    return kv.create(store, **checks)


def decide(made: KVStore | None, wanted: bool | None, one_device: bool) -> tuple[KVStore | None, bool]:
    """Return the store to use, if any, and whether it updates.

    Args:
        made: the store that there is.
        wanted: what the user has said; None leaves it to the table.
        one_device: whether this process trains on one device only.

    Raises:
        UsageError: an async store that is not to update; or several devices without a store.
    """
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


def require_free(store: KVStore) -> None:
    """Raise ``UsageError`` if ``store`` updates for a Trainer: it has one optimizer, with one set of numbers."""
    if store in _updating:
        raise UsageError("this store updates for another Trainer already; make one more with kvstore.create")


def take(store: KVStore, keys: Sequence[Any], weights: Any, *, updates: bool) -> None:
    """Give all workers rank 0's ``weights``, as the values of ``store``, and note whether it updates these from now on.

    Raises:
        UsageError: it has values of some of these names.
    """
    try:
        store.broadcast(keys, weights, weights)
    except AlreadyInitialized as exc:
        raise UsageError(
            f"this store has another model's values: {exc.args[0].partition(';')[0]}; make one more with kvstore.create"
        ) from None
    if updates:
        _updating.add(store)


def overlapping(
    params: Sequence[Parameter],
    store: KVStore | None,
    rates: Rates | None,
    *,
    wanted: bool | None,
    share_weights: bool,
    share_gradients: bool,
    forward: nn.Module | None,
) -> Overlap | None:
    """Return what pushes the gradients of ``params`` during backward, if anything is to.

    Args:
        rates: the hyper-parameters, if the store updates.
        wanted: what the user has said; None leaves it to what there is.
        share_weights, share_gradients: see ``Trainer``.
        forward: the model whose modules are to wait for the values, if any are.

    Raises:
        UsageError: what is wanted cannot be.
    """
    firsts = [param.tensors[0] for param in params]
    one_device = len(params[0].tensors) == 1
    dist = store is not None and store.type.startswith("dist") and one_device
    if wanted and (store is None or not one_device):
        raise UsageError("overlap=True needs a store, and one device a process")
    if forward is not None:
        require_waiting(forward, firsts, updates_there=dist and rates is not None)
        if wanted is False or share_gradients:
            raise UsageError("wait_in_forward goes neither with overlap=False nor with share_gradients=True")
    # What a module waits for is a bucket.
    buckets = divide([first.numel() * first.element_size() for first in firsts], small=forward is not None)
    if store is None or not one_device or (len(buckets) == 1 and forward is None):
        return None
    if not (dist and all(first.is_leaf for first in firsts) if wanted is None else wanted):
        return None
    return Overlap(params, buckets, store, rates=rates, share=share_weights, asked=bool(wanted), forward=forward)
