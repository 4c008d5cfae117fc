"""The group of workers that train together, as in Needle's ``ddp`` and Horovod.

    rank, device = workers.init()

A process has one group, with a store. So scripts need not pass a store around. A user that needs keys of its own takes
``new_store()``; all workers make these in the same order.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from kvstore import KVStore, UsageError
from kvstore.job.config import Config
from kvstore.store.maker import BY_THE_PROGRAM, COUNTED, GROUP
from workers.common.gather import require_sums
from workers.common.stores import AUTO, open_store, store_type


class RankAndDevice(NamedTuple):
    """What ``init`` returns: ``rank, device = workers.init()``.

    Attributes:
        rank: this worker's rank, from 0.
        device: its GPU by its rank on the host, or the CPU if there is no GPU.
    """

    rank: int
    device: torch.device


_lock = threading.Lock()
_stores: list[KVStore] = []  # the group's own store, then the ones of new_store
_type = ""  # the type of these stores


def init(kvstore: KVStore | str = "auto") -> RankAndDevice:
    """Join the other workers of the job. Every worker calls this first. A second call changes nothing.

    A process outside of a job is a group of one, with a ``device`` store.

    Args:
        kvstore: the type of a synchronous store, or a synchronous store without optimizer. ``auto``: ``dist_sync`` in a
            job, ``device`` outside of one, and on a later call whatever the group has.

    Returns:
        The rank, and the device: this worker's GPU by its rank on the host, or the CPU if there is no GPU.

    Raises:
        UsageError: the store is asynchronous; or this process is already initialized with another one.
        ConfigError: the environment describes a job that cannot be joined.
        DeadlineExceeded: not all members came in time. The message names the missing ones.
    """
    global _type
    wanted = store_type(kvstore)
    require_sums(wanted)
    if isinstance(kvstore, str) and wanted.startswith("dist") and not Config.from_env().in_job:
        wanted = "device"  # so that scripts for jobs also run alone
    with _lock:
        if not _stores:
            _stores.append(open_store(wanted if isinstance(kvstore, str) else kvstore, "workers.init()", GROUP))
            _type = wanted
        elif kvstore != AUTO and (wanted != _type or not (isinstance(kvstore, str) or kvstore is _stores[0])):
            raise UsageError(f"this process was initialized with {_type!r}; call shutdown() before another init()")
    return RankAndDevice(rank(), _device())


def shutdown() -> None:
    """Wait for all pushes, and close all stores of the group. ``init`` may be called again.

    Not needed at the end of a program.

    Raises:
        KVStoreError: a push has failed, and nothing has waited for it.
    """
    with _lock:
        while _stores:
            _stores.pop().close()


def is_initialized() -> bool:
    """Whether ``init`` has been called, and ``shutdown`` has not since."""
    return bool(_stores)


def store() -> KVStore:
    """Return the group's store. Its keys are shared: begin yours with a name of your own."""
    if not _stores:
        raise UsageError("this process has no group of workers yet: call workers.init() first")
    return _stores[0]


def new_store(owner: str = BY_THE_PROGRAM, name: str = COUNTED) -> KVStore:
    """Return another store of the group's type, with its own keys and compression; ``shutdown`` closes it.

    Every worker makes its stores in the same order.
    """
    store()
    made = open_store(_type, owner, name)
    with _lock:
        _stores.append(made)
    return made


def store_for(kvstore: KVStore | str | None, owner: str = BY_THE_PROGRAM, name: str = COUNTED) -> KVStore:
    """Return a store for ``owner``: ``kvstore`` itself or a new store of that type; for ``auto``, ``new_store()``."""
    return new_store(owner, name) if kvstore is None or kvstore == AUTO else open_store(kvstore, owner, name)


def store_of(kvstore: KVStore | str | None) -> KVStore:
    """Return ``kvstore`` itself, or for ``auto`` the group's store."""
    if isinstance(kvstore, str) and kvstore != AUTO:
        raise UsageError(f"kvstore={kvstore!r} must be a store, or 'auto' for that of workers.init()")
    return kvstore if isinstance(kvstore, KVStore) else store()


def rank() -> int:
    """Return this worker's rank, from 0."""
    return store().rank


def is_main() -> bool:
    """Return whether this worker does what is to be done once: write files, print, talk to a tracker.

    That is rank 0. In a job that goes on without workers that die, it is the lowest rank that is left, as this worker
    knows: news of a death come with heartbeats, so for a moment there may be none, or two.
    """
    return rank() == min(store().members())


def size() -> int:
    """Return the number of workers."""
    return store().num_workers


def local_rank() -> int:
    """Return this worker's rank among the workers of its host, from 0.

    Raises:
        UsageError: before ``init``; or the launcher has not set it.
    """
    return _local()[0]


def local_size() -> int:
    """Return the number of workers on this host.

    Raises:
        UsageError: before ``init``; or the launcher has not set it.
    """
    return _local()[1]


def _local() -> tuple[int, int]:
    if size() == 1:
        return 0, 1
    config = Config.from_env()
    if config.local_rank < 0 or config.local_size < 1:
        raise UsageError(
            "this worker's rank on its host is unknown: KVSTORE_LOCAL_RANK and KVSTORE_LOCAL_SIZE are not set; "
            "launch.py sets them"
        )
    return config.local_rank, config.local_size


def _device() -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    # Modulo: several workers of a host may share a GPU, as with one card and ``-n 2``.
    return torch.device("cuda", (_local()[0] if count > 1 else 0) % count)
