"""``join``: the end of the data for several trainers and stores at once."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from kvstore import DeadlineExceeded, UsageError


class Joinable(Protocol):
    """A trainer, or a store."""

    def join(self, timeout: float | None = None) -> int | None: ...


def join(*things: Joinable, timeout: float | None = None) -> int:
    """Say that this worker has run out of batches, to all ``things`` at once; return when all workers have.

        for batch in my_batches:  # as many as this worker has
            ...
        workers.join(trainer, tables)

    A step may push to several stores: that of a ``Trainer``, and one of embeddings. If a worker joined one after the
    other, the others' next step would wait for it in the second, and it for them in the first. Every worker names the
    same things, in the same order. See ``KVStore.join`` and ``Trainer.join``, which are for one.

    Args:
        things: trainers, optimizers, averagings and stores, each store once; of ``PeriodicAveraging``, ``PartialSync``
            and ``DiLoCo`` one at most.
        timeout: for each of them, in seconds; by default its deadline, which others' remaining batches may need longer
            than.

    Returns:
        The rank that joined the last of them last.

    Raises:
        DeadlineExceeded: others have more to do; the message names them. Calls of each thing's own ``join`` wait on.
        NodeLost: a worker has died, or left without joining.
        UsageError: two of them average weights.
    """
    # These take part in the averages of workers that go on, while they wait for them in ``join``.
    serving = [position for position, thing in enumerate(things) if hasattr(thing, "after_step")]
    if len(serving) > 1:
        raise UsageError("workers.join() takes one of PeriodicAveraging, PartialSync and DiLoCo, not several")
    last: dict[int, int | None] = {}
    # All say first that they have no more batches, then all wait: one that joined the things one by one would wait in
    # the first for a worker that waits for it in the second.
    for position, thing in enumerate(things):
        begin = getattr(thing, "begin_join", None)
        if begin is not None:  # not ``join(0)``, which might go on to what all workers do together, in another order
            begin()
            continue
        with suppress(DeadlineExceeded):  # the announcement has been made all the same
            last[position] = thing.join(0)
    others = [position for position in range(len(things)) if position not in serving]
    for position in (*serving, *others):  # others go on only while this one serves them
        if position not in last:
            last[position] = things[position].join(timeout)
    return last.get(len(things) - 1) or 0
