"""The calls of a store that are about the job: its workers, how they wait for each other, and what they report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from kvstore.client.barriers import WorkerBarriers
from kvstore.client.checkpointing import Checkpointing
from kvstore.client.join import Joining
from kvstore.client.plans.entries import Entries
from kvstore.client.store_calls import StoreCalls
from kvstore.errors import UsageError
from kvstore.rule import Rule
from kvstore.store.job_interface import JobInterface, ReservedJoin


class JobCalls(StoreCalls, JobInterface):
    """Has these calls; what they need is a ``DistStore``'s."""

    rule: Rule
    _barriers: WorkerBarriers
    _checkpoints: Checkpointing | None
    _entries: Entries
    _joining: Joining
    _join_advice = ""  # what to call instead of ``join``; empty if nobody has reserved it

    @property
    def barriers(self) -> int:
        """How many barriers this worker has passed: where one that has fallen behind the others stands."""
        return self._barriers.passed

    def barrier(self) -> None:
        """See ``KVStore``."""
        self._check()
        if self.rule.mode == "async":  # no round waits for these, so nothing else says that they are in
            self._pushes.flush()
        self._barriers.wait()

    def join(self, timeout: float | None = None) -> int:
        """See ``KVStore``."""
        self._require_join()
        return self._join(timeout)

    def begin_join(self, timeout: float | None = None) -> None:
        """See ``KVStore``."""
        self._require_join()
        self._begin_join(timeout)

    def reserve_join(self, advice: str) -> ReservedJoin:
        """See ``KVStore``."""
        self._join_advice = advice
        return ReservedJoin(self._begin_join, self._join)

    def _join(self, timeout: float | None) -> int:
        self._begin_join(timeout)
        self._joining.wait(timeout)  # should others be late, this worker has joined: another call waits on
        last = self._session.client.alone(self._joining.end, self._entries)
        self._pushes.flush()
        if self._checkpoints is not None:
            self._checkpoints.end_join()
        return last

    def _begin_join(self, timeout: float | None = None) -> None:
        self._check()
        if self._joining.under_way:
            return
        if self.rule.mode == "async":
            self._pushes.flush(timeout)
        if self._checkpoints is not None:
            self._checkpoints.begin_join()
        self._joining.begin(self._entries)

    def _require_join(self) -> None:
        if self._join_advice:
            raise UsageError(self._join_advice)

    def num_dead_nodes(self) -> int:
        """See ``KVStore``."""
        return self._session.num_dead_nodes()

    def report(self, values: Mapping[str, float] | None = None, *, input_s: float = 0.0) -> None:
        """See ``KVStore``."""
        if values:
            self._session.activity.log(values)
        if input_s:
            self._session.activity.read_input(input_s)
            tracer = self._session.tracer
            if tracer is not None and tracer.open:
                tracer.span("input", tracer.clock() - input_s)

    def traced(self, name: str) -> AbstractContextManager[None]:
        """See ``KVStore``."""
        tracer = self._session.tracer
        return nullcontext() if tracer is None else tracer.during(name)
