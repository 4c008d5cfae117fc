"""Where a Trainer's updates happen, by Gluon's table, and whether gradients are pushed during backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import kvstore as kv
from kvstore import AlreadyInitialized, KVStore, Unsupported, UsageError
from kvstore.job.config import Config
from kvstore.store.maker import made_by
from kvstore.store.registry import Builtin, find
from workers.common.buckets import divide
from workers.common.stores import store_type
from workers.common.tensors import has_parts, overwrite
from workers.reducer import Reducer
from workers.trainer.arrivals import require_waiting
from workers.trainer.outside_writes import OutsideWrites
from workers.trainer.overlap import Overlap
from workers.trainer.parameters import Parameter
from workers.trainer.rates import TrainerRates

log = logging.getLogger(__name__)

_updating: weakref.WeakSet[KVStore] = weakref.WeakSet()  # stores that have a Trainer's optimizer


def opened(store: KVStore | str | None, check_finite: bool) -> KVStore | None:
    """Return the store to use: a new one for a type of store. ``check_finite`` applies to kvstore's own types only."""
    if not isinstance(store, str):
        return store
    name = store_type(store)
    checks = {"check_finite": True} if check_finite and isinstance(find(name), Builtin) else {}
    with made_by("Trainer"):
        return kv.create(name, **checks)


def decide(made: KVStore | None, wanted: bool | None, one_device: bool) -> tuple[KVStore | None, bool]:
    """Return the store to use, or None, and whether it updates.

    Args:
        made: the store, or None.
        wanted: the argument ``update_on_kvstore``; None leaves the decision to the table.
        one_device: whether this process trains on one device only.

    Raises:
        UsageError: ``update_on_kvstore=False`` for an async store; or several devices without a store.
    """
    if made is None and not one_device:
        raise UsageError(
            "several devices need a store to sum their gradients, and kvstore=None is none: pass kvstore='device'"
        )
    if made is None:
        return None, False
    is_async = any(word in made.type for word in ("async", "ssp"))
    if wanted is False and is_async:
        raise UsageError(
            f"update_on_kvstore=False does not work with a {made.type!r} store, which updates for every push: use "
            "'dist_sync'"
        )
    if wanted is not None:
        return made, wanted
    if is_async:
        return made, True
    if one_device and made.num_workers == 1 and not made.type.startswith("dist"):
        return None, False
    return made, Config.from_env().update_on_kvstore and made.is_capable("optimizer")


def require_free(store: KVStore) -> None:
    """Raise ``UsageError`` if ``store`` already updates for a Trainer; a store has one optimizer."""
    if store in _updating:
        raise UsageError("this store already updates for another Trainer; make a second store with kvstore.create")


def take(store: KVStore, keys: Sequence[Any], weights: Any, *, updates: bool) -> None:
    """Make rank 0's ``weights`` the values of ``store`` and of all workers.

    Args:
        store: the trainer's store.
        keys, weights: of the parameters.
        updates: whether the store updates the weights from now on.

    Raises:
        UsageError: the store already has values under some of these keys.
    """
    try:
        store.broadcast(keys, weights, weights)
    except AlreadyInitialized as exc:
        raise UsageError(
            f"this store has another model's values: {exc.args[0].partition(';')[0]}; make a second one with "
            "kvstore.create"
        ) from None
    if updates:
        _updating.add(store)


def give_first(store: KVStore, replicas: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Give every worker and device rank 0's values of what is not trained: frozen parameters, and buffers.

    The trainer's store does not have them: its servers would hold, and its checkpoints save, what never changes.

    Args:
        store: the trainer's store.
        replicas: for each device, tensors by name.
    """
    first, *others = replicas
    named = {name: tensor for name, tensor in first.items() if has_parts(tensor)}
    if not named:
        return
    if store.num_workers > 1:
        try:
            beside = store.companion()
        except Unsupported:  # a class of somebody else's, which needs to have no more than pushes and pulls
            log.warning(
                "a %r store has no companion: frozen parameters and buffers stay those of each worker", store.type
            )
            return
        with beside:
            Reducer.over(beside).broadcast(named)
    for other in others:
        for name in named.keys() & other.keys():
            overwrite(other[name], named[name].detach().to(other[name].device))


def require_alone(overlap: bool | None, forward: nn.Module | None) -> None:
    """Raise ``UsageError`` if a trainer without a store is given what needs one.

    Args:
        overlap, forward: the arguments ``overlap`` and ``wait_in_forward``.
    """
    if overlap:
        raise UsageError("overlap=True needs a store, and one device per process")
    if forward is not None:
        require_waiting(forward, list(forward.parameters()), updates_there=False)


def overlapping(
    params: Sequence[Parameter],
    store: KVStore,
    rates: TrainerRates | None,
    *,
    wanted: bool | None,
    share_weights: bool,
    share_gradients: bool,
    forward: nn.Module | None,
    frozen: Collection[int] = (),
    writes: OutsideWrites | None = None,
) -> Overlap | None:
    """Return the ``Overlap`` that pushes the gradients of ``params`` during backward, or None.

    Args:
        params: the parameters.
        store: the trainer's store.
        rates: the hyper-parameters, if the store updates.
        wanted: the argument ``overlap``; None decides by store and model.
        share_weights, share_gradients: see ``Trainer``.
        forward: the argument ``wait_in_forward``.
        frozen: positions of parameters that are not trained.
        writes: is told of values that are written into parameters between the steps.

    Raises:
        UsageError: the arguments contradict each other or the store.
    """
    firsts = [param.tensors[0] for param in params]
    one_device = len(params[0].tensors) == 1
    dist = store.type.startswith("dist") and one_device
    if wanted and not one_device:
        raise UsageError("overlap=True needs a store, and one device per process")
    if forward is not None:
        require_waiting(forward, firsts, updates_there=dist and rates is not None)
        if wanted is False or share_gradients:
            raise UsageError("wait_in_forward works neither with overlap=False nor with share_gradients=True")
    # Modules wait for whole buckets, so these are small with ``forward``.
    sizes = [0 if at in frozen else first.numel() * first.element_size() for at, first in enumerate(firsts)]
    buckets = divide(sizes, small=forward is not None)
    if not one_device or (len(buckets) == 1 and forward is None):
        return None
    if not (dist and all(first.is_leaf for first in firsts) if wanted is None else wanted):
        return None
    return Overlap(
        params,
        buckets,
        store,
        rates=rates,
        share=share_weights,
        asked=bool(wanted),
        forward=forward,
        frozen=frozen,
        writes=writes,
    )
