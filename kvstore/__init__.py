"""A parameter server for PyTorch and NumPy, with the API of MXNet's KVStore.

import kvstore as kv

store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
store.init("w", weight)
store.pushpull("w", grad, out=weight)
"""

from kvstore.errors import (
    AlreadyInitialised,
    ConfigError,
    DeadlineExceeded,
    KeyNotInitialised,
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
)
from kvstore.store.base import KVStore
from kvstore.store.factory import create
from kvstore.store.statistics import Statistics
from kvstore.ticket import Ticket

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitialised",
    "ConfigError",
    "DeadlineExceeded",
    "KVStore",
    "KVStoreError",
    "KeyNotInitialised",
    "Mismatch",
    "NodeLost",
    "NotFinite",
    "PeerError",
    "ServerError",
    "Statistics",
    "Ticket",
    "UnknownName",
    "Unsupported",
    "UsageError",
    "WeightsInDoubt",
    "WireError",
    "create",
]
