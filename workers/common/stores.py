"""The argument ``kvstore``: which store ``auto`` stands for."""

from __future__ import annotations

import kvstore as kv
from kvstore import KVStore
from kvstore.job.config import Config

AUTO = "auto"


def store_type(kvstore: KVStore | str) -> str:
    """Return the type of store that ``kvstore`` asks for.

    ``auto`` is ``dist_sync`` in a job (started by launch.py, launcher.run, torchrun, mpirun or srun) and ``device``
    outside of one. Any other name is returned as it is.
    """
    name = kvstore if isinstance(kvstore, str) else kvstore.type
    if name.lower() != AUTO:
        return name
    return "dist_sync" if Config.from_env().in_job else "device"


def open_store(kvstore: KVStore | str) -> KVStore:
    """Return ``kvstore`` itself if it is a store, else a new store of that type."""
    return kv.create(store_type(kvstore)) if isinstance(kvstore, str) else kvstore
