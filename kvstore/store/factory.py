"""``create``: from the name of a store to a store. Imports the store's module, and torch with it, on the first call."""

from __future__ import annotations

import importlib
from typing import Any

from kvstore.dynamo import outside_graphs
from kvstore.errors import ConfigError
from kvstore.job.system import unsupported
from kvstore.store.base import KVStore
from kvstore.store.registry import Builtin, find


@outside_graphs
def create(name: str = "local", **options: Any) -> KVStore:
    """Return a new store.

    Args:
        name: ``local``, ``device``, ``dist_sync`` (or ``dist``), ``dist_device_sync``, ``dist_async``, ``dist_ssp``,
            one of MXNet's other names for these, or a registered one; upper or lower case.
        options: by name; those below, or a registered store's own.

    Every store takes one option:

    - ``check_finite`` (False): refuse pushes with NaN or infinite elements, with ``NotFinite``, which names worker, key
      and push. It costs a look at every sum.

    Dist stores take more:

    - ``timeout``: the deadline of every wait, in seconds; by default ``KVSTORE_TIMEOUT_S``.
    - ``bigarray_bound``: the number of elements from which an array is cut across all servers; by default
      ``KVSTORE_BIGARRAY_BOUND``.
    - ``quorum``, for ``dist_sync`` and ``dist_device_sync``: how many workers' pushes make a round; by default all.
    - ``late`` (``drop``): with a quorum, what becomes of pushes after their round: ``drop`` them, or ``keep`` them for
      the next one.
    - ``grace`` (0), with a quorum: how long a round that has its quorum waits for other workers at most, in seconds. It
      waits for each as long as that one's last late pushes took, and not at all if these mostly took longer.
    - ``staleness`` (3), for ``dist_ssp``: how many pushes a worker that reads may be ahead of the slowest.
    - ``delay_compensation`` (0), for ``dist_async`` and ``dist_ssp``: the factor with which gradients are corrected for
      what others have changed since the worker last read.
    - ``aggregate`` (``rounds``), for ``dist_async`` and ``dist_ssp``: with ``rounds``, each push makes an update of its
      own; with ``host``, pushes that come from the workers of one host while an earlier one is under way are summed,
      and make one update. Stores with rounds always sum by host.

    Raises:
        UnknownName: no such store, or no such option; the message lists those there are.
        ConfigError: a dist store outside a job, or on Windows.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, not {type(name).__name__}")
    maker = find(name)
    store: KVStore
    if isinstance(maker, Builtin):
        if maker.module == "kvstore.client" and (why := unsupported(f"kv.create({name!r})")):
            raise ConfigError(why)  # now, before modules are imported that are not there
        cls = getattr(importlib.import_module(maker.module), maker.cls)
        store = cls.create(name.lower(), maker.canonical, options)
    else:
        store = maker(**options)
    return store
