"""The argument ``kvstore``: which store ``auto`` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import kvstore as kv
from kvstore import KVStore
from kvstore.errors import UsageError
from kvstore.job.config import Config
from kvstore.store.maker import BY_THE_PROGRAM, COUNTED, made_by
from kvstore.store.registry import Builtin, find

AUTO = "auto"
NO_RULE: Mapping[str, Any] = MappingProxyType({})


def store_type(kvstore: KVStore | str) -> str:
    """Return the type of store that ``kvstore`` asks for: ``auto`` is ``dist_sync`` in a job, else ``device``."""
    name = kvstore if isinstance(kvstore, str) else kvstore.type
    if name.lower() != AUTO:
        return name
    return "dist_sync" if Config.from_env().in_job else "device"


def part_of(num_workers: int, rank: int) -> tuple[int, int]:
    """Return how many parts data has, and which of them is this worker's.

    Raises:
        UsageError: this worker was added while the job ran.
    """
    if rank >= num_workers:
        raise UsageError(
            f"worker {rank} was added to this job (--max-workers), and its first {num_workers} workers have all parts "
            "of the data: let workers.ElasticSampler share it out, or leave it as it is (split=False)"
        )
    return num_workers, rank


def updates_each_push(kind: str) -> bool:
    """Whether a store of type ``kind`` makes an update of every push, so that there are no rounds of all workers."""
    return "async" in kind or "ssp" in kind


def open_store(
    kvstore: KVStore | str,
    owner: str = BY_THE_PROGRAM,
    name: str = COUNTED,
    check_finite: bool = False,
    rule: Mapping[str, Any] = NO_RULE,
) -> KVStore:
    """Return ``kvstore`` itself if it is a store, else a new store of that type, of ``owner``.

    ``rule``: options of a new store with rounds over several workers.
    """
    if not isinstance(kvstore, str):
        return kvstore
    kind = store_type(kvstore)
    # A class that the program has registered takes other arguments.
    checks = {"check_finite": True} if check_finite and isinstance(find(kind), Builtin) else {}
    with made_by(owner, name):
        # In one process there is nobody to wait for.
        return kv.create(kind, **checks, **(rule if "dist" in kind.lower() else NO_RULE))


def join_refusal(owner: str, remedy: str = "Call its own join()") -> str:
    """What a program is told that calls ``join`` of the store of ``owner``, the name of a class."""
    return (
        f"this store is that of a {owner}: store.join() would leave its workers with different weights. {remedy}, or "
        "workers.join() with it and with other stores"
    )
