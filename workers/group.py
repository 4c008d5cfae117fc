"""The workers that train together, and the store through which they do: what Needle's ``ddp`` and Horovod call init.

    rank, device = workers.init()

A process has one group. Everything that a training script shares goes through stores of it, so scripts need not pass
one around; what wants keys of its own takes ``new_store()``, in the same order on all workers.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

import kvstore as kv
from kvstore import KVStore, UsageError
from kvstore.job.config import Config
from workers.common.gather import require_sums


class Place(NamedTuple):
    """Where a worker is: ``rank``, from 0, and the ``device`` that is its own."""

    rank: int
    device: torch.device


_lock = threading.Lock()
_stores: list[KVStore] = []  # the group's, then those that new_store has made
_kind = ""  # what init was asked for


def init(kvstore: KVStore | str = "dist_sync") -> Place:
    """Join the other workers of the job; called first, on every worker. Called again, it changes nothing.

    A process that no launcher has started is a group of one, with a ``local`` store.

    Args:
        kvstore: the name of a synchronous store, or one without optimizer.

    Returns:
        The rank, and a device: of this host's GPUs the one of this worker's turn, or the CPU where there is none.

    Raises:
        UsageError: an asynchronous store; or this process has been initialised with another.
        ConfigError: the environment describes a job that cannot be joined.
        DeadlineExceeded: not all members came in time; the message names the missing.
    """
    global _kind
    wanted = kvstore if isinstance(kvstore, str) else kvstore.type
    require_sums(wanted)
    with _lock:
        if _stores:
            if wanted != _kind or (not isinstance(kvstore, str) and kvstore is not _stores[0]):
                raise UsageError(f"this process was initialised with {_kind!r}; call shutdown() before another init()")
        else:
            _stores.append(_create(kvstore) if isinstance(kvstore, str) else kvstore)
            _kind = wanted
    return Place(rank(), _device())


def shutdown() -> None:
    """Wait for what has been pushed and end the use of all stores of the group; ``init`` may be called again.

    Not needed at the end of a program.

    Raises:
        KVStoreError: a push had failed, and nobody had waited for it.
    """
    with _lock:
        while _stores:
            _stores.pop().close()


def is_initialized() -> bool:
    """Whether ``init`` has been called, and ``shutdown`` has not since."""
    return bool(_stores)


def store() -> KVStore:
    """Return the group's store. Its keys are everybody's: begin yours with a name of your own.

    Raises:
        UsageError: before ``init``.
    """
    if not _stores:
        raise UsageError("this process has no group of workers yet: call workers.init() first")
    return _stores[0]


def new_store() -> KVStore:
    """Return one more store of the group's kind, with keys and compression of its own; closed by ``shutdown``.

    Every worker makes its stores in the same order.

    Raises:
        UsageError: before ``init``.
    """
    store()
    made = _create(_kind)
    with _lock:
        _stores.append(made)
    return made


def rank() -> int:
    """Return this worker's number, from 0."""
    return store().rank


def size() -> int:
    """Return how many workers there are."""
    return store().num_workers


def local_rank() -> int:
    """Return this worker's number among those of its host, from 0.

    Raises:
        UsageError: before ``init``; or whoever started this process has not said.
    """
    return _local()[0]


def local_size() -> int:
    """Return how many workers this host has.

    Raises:
        UsageError: before ``init``; or whoever started this process has not said.
    """
    return _local()[1]


def _create(kind: str) -> KVStore:
    """Return a store of ``kind``; in a process that belongs to no job, one for it alone."""
    return kv.create(kind if Config.from_env().in_job or not kind.startswith("dist") else "local")


def _local() -> tuple[int, int]:
    if size() == 1:
        return 0, 1
    config = Config.from_env()
    if config.local_rank < 0 or config.local_size < 1:
        raise UsageError(
            "which worker of its host this is has not been said: KVSTORE_LOCAL_RANK and KVSTORE_LOCAL_SIZE are not "
            "set; launch.py sets them"
        )
    return config.local_rank, config.local_size


def _device() -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    return torch.device("cuda", (_local()[0] if count > 1 else 0) % count)
