"""``connect``: from a file, an address or the environment to a reader. Brings torch on the first call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.dynamo import outside_graphs
from kvstore.errors import ConfigError, UsageError
from kvstore.job.system import unsupported
from kvstore.store.maker import GROUP

if TYPE_CHECKING:
    from kvstore.reading.reader import Reader


@outside_graphs
def connect(
    address: str | os.PathLike[str] | None = None,
    key: str | None = None,
    *,
    store: int | str = 1,
    max_staleness: int = 0,
    timeout: float | None = None,
) -> Reader:
    """Return a reader of a running job: it pulls values and rows, takes no part in training, and changes nothing.

    The job was started with ``launch.py --readers FILE``. Use the reader in a ``with`` block, or close it.

    Args:
        address: that file; or the scheduler's address, ``tcp://host:port?key=...`` or ``ipc://path``; by default
            ``KVSTORE_READ_FROM`` says either.
        key: the readers' secret key, if ``address`` is an address and links are encrypted; by default
            ``KVSTORE_READ_KEY``. Do not write it into a command line, which others can see.
        store: which of the job's stores: 1 for the first that the program has made, itself or by the name that it gave
            to a ``Trainer`` or ``fit``; ``"workers"`` for that of ``workers.init()``. Stores of checkpoints, of a
            ``Reducer`` and of ``companion()`` are not counted.
        max_staleness: what ``pull`` may return is at most so many rounds old; 0 asks for what is current.
        timeout: of every wait of the reader, in seconds; by default ``KVSTORE_TIMEOUT_S``.

    Raises:
        ConfigError: the arguments do not say where a job is.
        DeadlineExceeded: no job answers there, or not all its members have joined in time.
        UsageError: the job takes no readers, or has as many as it takes.
        NodeLost: the job has failed, or has ended.
    """
    if why := unsupported("kv.connect()"):
        raise ConfigError(why)
    name = f"{store}"
    if name != GROUP and not (name.isdecimal() and int(name)):
        raise UsageError(
            f"store={store!r}: stores are counted from 1, in the order in which workers make them; {GROUP!r} is that "
            "of workers.init()"
        )
    from kvstore.reading.readers_file import find  # what it imports is not on every system

    place = find(address, key, os.environ)
    from kvstore.reading.reader import Reader

    return Reader.of(place.config(os.environ), name, max_staleness, timeout)
