"""``join``: the end of the data for several trainers and stores at once."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from kvstore import DeadlineExceeded


class Joinable(Protocol):
    """A trainer, or a store."""

    def join(self, timeout: float | None = None) -> int | None:
        """See ``KVStore.join``."""


def join(*things: Joinable, timeout: float | None = None) -> int:
    """Say that this worker has run out of batches, to all ``things`` at once; return when all workers have.

        for batch in my_batches:  # as many as this worker has
            ...
        workers.join(trainer, tables)

    A step may push to several stores: that of a ``Trainer``, and one of embeddings. If a worker joined one after the
    other, the others' next step would wait for it in the second, and it for them in the first. Every worker names the
    same things, in the same order. See ``KVStore.join`` and ``Trainer.join``, which are for one.

    Args:
        things: trainers and stores, each store once.
        timeout: for each of them, in seconds; by default its deadline, which others' remaining batches may need longer
            than.

    Returns:
        The rank that joined the last of them last.

    Raises:
        DeadlineExceeded: others have more to do; the message names them. Calls of each thing's own ``join`` wait on.
        NodeLost: a worker has died, or left without joining.
    """
    last: dict[int, int | None] = {}
    for position, thing in enumerate(things):
        with suppress(DeadlineExceeded):  # the announcement has been made all the same
            last[position] = thing.join(0)
    for position, thing in enumerate(things):
        if position not in last:
            last[position] = thing.join(timeout)
    return last.get(len(things) - 1) or 0
