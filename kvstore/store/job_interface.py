"""The part of KVStore, the interface, that is about the job: its workers, and how they wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from kvstore.store.named import Named


class ReservedJoin(NamedTuple):
    """The calls of a store whose ``join`` is reserved.

    Attributes:
        begin: see ``KVStore.begin_join``.
        join: see ``KVStore.join``.
    """

    begin: Callable[[], None]
    join: Callable[[float | None], int]


class JobInterface(Named):
    """A store as one worker's end of a job; by default of the only one."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return 1

    def barrier(self) -> None:
        """Return when all workers have come to this call.

        Raises:
            DeadlineExceeded: they have not, in time; the message names the missing.
        """

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches, and return when all workers have: Horovod's ``join``.

            for batch in my_batches:  # as many as this worker has
                ...
            store.join()

        Rounds go on without it: from its last push of each key on, sums are over the workers that still push, as if it
        pushed zeros. So gradients that are divided by ``num_workers``, or by the size of the whole batch, go on
        counting each sample the same, and the last rounds of an epoch are small steps. Which rounds a worker is in
        depends on what it has pushed, never on when it calls this. With a quorum, a round is over when so many of
        those who still push are there, and stands for these. In ``dist_async`` and ``dist_ssp`` nobody waits for a
        worker that has joined, which it has once its pushes are answered: a ``pushpull`` with ``wait=False`` too.

        When it returns everybody contributes to the next round again, and a ``pull`` gives what the last round left:
        those who had joined need one. ``barrier`` and ``init`` that need a worker which has joined raise
        ``UsageError``. If nobody has run out early it is a barrier after the last push.

        Args:
            timeout: in seconds; by default the store's deadline, which others' remaining batches may need longer than.

        Returns:
            The rank that joined last: the worker that has pushed most, of several the highest.

        Raises:
            DeadlineExceeded: others have more to do; the message names them. Another call waits on.
            NodeLost: a worker has died, or left without joining.
            UsageError: the join is reserved; the message says what to call instead.
        """
        if self.num_workers > 1:
            raise self._unsupported("join")
        return self.rank

    def begin_join(self, timeout: float | None = None) -> None:
        """Say that this worker has run out of batches, and return at once; ``join`` waits for the others.

        A store that cannot do so does nothing, and says it in ``join``.

        Args:
            timeout: how long to wait for pushes to take effect, in a store whose every push is an update.
        """

    def reserve_join(self, advice: str) -> ReservedJoin:
        """Let calls of ``join`` raise ``UsageError`` with ``advice`` from now on; return what joins all the same.

        For what keeps values in the workers, which ``join`` alone would let part: rounds that a worker is not in change
        the others' values, and no ``pull`` brings them.
        """
        return ReservedJoin(self.begin_join, self.join)

    def report(self, values: Mapping[str, float] | None = None, *, input_s: float = 0.0) -> None:
        """Say how this worker's training goes, for whoever looks at the job; a store without a job ignores it.

            store.report({"loss": loss.item(), "epoch": epoch})

        Nothing is sent at once: it goes with what the worker reports every second or so. ``fit`` calls it.

        Args:
            values: numbers by name, each in place of the last one of its name. Those that are not finite are left out,
                and so are those after 32 names.
            input_s: how long this worker has just waited for the next batch, in seconds. If workers say so, a slow one
                is known to wait for data, or not.
        """

    def traced(self, name: str) -> AbstractContextManager[None]:
        """Show how long a block takes, under this name, in the trace of ``launch.py --trace``.

            with store.traced("forward"):
                loss = model(batch)

        Without a trace, or outside of its rounds, nothing happens. ``fit`` shows forward and backward passes, and
        ``Trainer`` steps.

        Args:
            name: what the block does.
        """
        return nullcontext()

    def num_dead_nodes(self) -> int:
        """How many members of the job are lost; once that has ended the job, this too raises ``NodeLost``."""
        return 0
