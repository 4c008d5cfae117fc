"""A parameter server for PyTorch and NumPy, with the API of MXNet's KVStore.

import kvstore as kv

store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
store.init("w", weight)
store.pushpull("w", grad, out=weight)
"""

import importlib
from typing import TYPE_CHECKING

from kvstore.errors import (
    OLD_NAMES,
    AlreadyInitialized,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    KeyNotInitialized,
    KVStoreError,
    Mismatch,
    NodeLost,
    NotFinite,
    PeerError,
    ServerError,
    UnknownName,
    Unsupported,
    UsageError,
    WeightsInDoubt,
    WireError,
    renamed,
)
from kvstore.reading.connect import connect
from kvstore.store.base import KVStore
from kvstore.store.factory import create
from kvstore.store.statistics import Statistics
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen
from kvstore.ticket import Ticket

if TYPE_CHECKING:
    from kvstore.checkpoint.any_checkpoint import read_checkpoint
    from kvstore.checkpoint.mxnet_conversion import export_mxnet, import_mxnet
    from kvstore.reading.followed_table import FollowedTable
    from kvstore.reading.follower import Follower
    from kvstore.reading.reader import Reader
    from kvstore.rows.foreign_files import export_parquet, read_parquet, read_vectors
    from kvstore.rows.hashed_ids import hash_ids
    from kvstore.rows.open_table import OpenTable, open_table
    from kvstore.rows.row_sparse import RowSparse

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitialized",
    "Capacity",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "FollowedTable",
    "Follower",
    "KVStore",
    "KVStoreError",
    "KeyNotInitialized",
    "MinCount",
    "Mismatch",
    "NodeLost",
    "NotFinite",
    "OpenTable",
    "PeerError",
    "Probability",
    "Reader",
    "RowSparse",
    "ServerError",
    "Statistics",
    "Table",
    "Ticket",
    "UnknownName",
    "Unseen",
    "Unsupported",
    "UsageError",
    "WeightsInDoubt",
    "WireError",
    "connect",
    "create",
    "export_mxnet",
    "export_parquet",
    "hash_ids",
    "import_mxnet",
    "open_table",
    "read_checkpoint",
    "read_parquet",
    "read_vectors",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# Public names whose modules need numpy or torch, which ``import kvstore`` does not import.
_LATER = {
    "FollowedTable": "kvstore.reading.followed_table",
    "Follower": "kvstore.reading.follower",
    "Reader": "kvstore.reading.reader",
    "OpenTable": "kvstore.rows.open_table",
    "RowSparse": "kvstore.rows.row_sparse",
    "export_mxnet": "kvstore.checkpoint.mxnet_conversion",
    "export_parquet": "kvstore.rows.foreign_files",
    "hash_ids": "kvstore.rows.hashed_ids",
    "import_mxnet": "kvstore.checkpoint.mxnet_conversion",
    "open_table": "kvstore.rows.open_table",
    "read_checkpoint": "kvstore.checkpoint.any_checkpoint",
    "read_parquet": "kvstore.rows.foreign_files",
    "read_vectors": "kvstore.rows.foreign_files",
}

if not TYPE_CHECKING:  # type checkers would take every name for one of the module's
    _former = renamed(__name__, OLD_NAMES, stacklevel=4)

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            return _former(name)
        globals()[name] = value = getattr(importlib.import_module(_LATER[name]), name)
        return value
