"""How one store on one server goes on: rounds close, and the requests that waited for them are answered.

A push closes the rounds that it completes, and so does a worker that leaves or is inside ``join``. Requests that need
not wait are answered at once. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvstore import wire
from kvstore.errors import UsageError, WeightsInDoubt
from kvstore.rule import Rule
from kvstore.tracing.tracer import Tracer
from kvstore.wire.frames import SharedFields
from servers.requests.replies import Answer, refuse
from servers.store.buckets import Buckets
from servers.store.capture import Captures
from servers.store.contributions import behind_most
from servers.store.lateness import ArrivalTimes
from servers.store.row_target import RowTarget, TableGroup
from servers.store.served_tables import ServedTables
from servers.store.target import AnyTarget, Bucket, ParkedRequest, PushRequest, WaitingRequest
from servers.store.updates import Updates
from servers.store.value_replies import ValueReplies
from servers.store.waiting import Waiting

OF_ARRAYS = (wire.Push, wire.Pull)
OF_ROWS = (wire.PushRows, wire.PullRows)


class StoreProgress:
    """Closes the rounds of one store, and answers its requests.

    Args:
        rule: of the store.
        buckets: of the store.
        updates: what closed rounds do to its arrays.
        tables: what they do to its tables, and the answers that bring rows.
        captures: of checkpoints, which need the values of some rounds.
        values: the answers that bring values.
        waiting: the requests that wait for rounds.
        times: when pushes come.

    Attributes:
        tracer: notes updates for the job's trace; None notes nothing.
    """

    def __init__(
        self,
        rule: Rule,
        buckets: Buckets,
        updates: Updates,
        tables: ServedTables,
        captures: Captures,
        values: ValueReplies,
        waiting: Waiting,
        times: ArrivalTimes,
    ) -> None:
        self.tracer: Tracer | None = None
        self._rule = rule
        self._buckets = buckets
        self._updates = updates
        self._tables = tables
        self._captures = captures
        self._values = values
        self._waiting = waiting
        self._times = times

    def pushed(
        self, peer: bytes, message: PushRequest, targets: Sequence[AnyTarget], late: int, error: Exception | None
    ) -> list[Answer]:
        """Answer a push, or let it wait, and close the rounds of ``targets`` that it completes."""
        if error is not None:
            answers = [refuse(peer, message, error)]
        else:
            # Parked before rounds are closed, so that it learns of their errors.
            answers = self.answer(self._waiting.park(peer, message, late, targets))
        answers += self.contributed(message, targets)
        if self._waiting.pauses.ranks:
            answers += self.resume()
        return answers

    def contributed(self, message: PushRequest, targets: Sequence[AnyTarget]) -> list[Answer]:
        """Close the rounds of ``targets`` that a push has completed, and answer the requests that waited for them."""
        answers = self.advance(targets, message)
        if self._rule.mode == "sync" and targets:
            self._times.contributed(message.workers, message.clocks[0], targets, self._rule.quorum is not None)
        return answers

    def advance(self, touched: Sequence[AnyTarget], push: PushRequest | None = None) -> list[Answer]:
        """Close the rounds of ``touched`` that are complete, and answer the requests that waited for them.

        Args:
            push: which has changed ``touched``, if one has.
        """
        if self._rule.mode == "async":
            ready = self._waiting.release(touched, {})
            if push is not None:
                self._times.updated(behind_most(push), touched, ready)
            if self._buckets.doubts:
                ready += self._waiting.give_up_hopeless()
            return self.answer(ready)
        answers: list[Answer] = []
        while wave := [(target, items) for target in touched if (items := target.rounds.complete()) is not None]:
            whole = [(target, items) for target, items in wave if isinstance(target, Bucket)]
            striped: list[tuple[RowTarget, list[Any]]] = []
            if len(whole) < len(wave):
                striped = [(target, items) for target, items in wave if isinstance(target, RowTarget)]
            if self._captures:
                self._captures.secure([bucket for bucket, _ in whole])
            errors: dict[Any, Exception] = {}
            began = 0.0 if self.tracer is None else self.tracer.clock()
            if whole:
                errors.update(self._updates.close(whole))
            if striped:
                errors.update(self._tables.updates.close(striped))
            for target, items in wave if len(whole) + len(striped) < len(wave) else ():
                if isinstance(target, TableGroup) and (error := self._tables.groups.close(target, items)) is not None:
                    errors[target] = error
            if self._captures:
                self._captures.reached([target for target, _ in wave])
            touched = [target for target, _ in wave]  # no other has a round that is complete now
            if self.tracer is not None:
                self.note(self.tracer, "update", began, [target.rounds.version for target in touched], touched)
            answers += self.answer(self._waiting.release(touched, errors))
        if self._buckets.doubts:  # others may have pushed further already
            answers += self.answer(self._waiting.give_up_hopeless())
        return answers

    def without_pushes(self, targets: Sequence[AnyTarget]) -> list[Answer]:
        """Go on now that workers will not push for some time, or ever: close rounds, and give up what waits in vain."""
        return self.advance(targets) + self.answer(self._waiting.give_up_hopeless()) + self.resume()

    def note(
        self, tracer: Tracer, name: str, began: float, rounds: Sequence[int], targets: Sequence[AnyTarget] = ()
    ) -> None:
        """Note that ``targets`` have been updated since ``began``, if these rounds of them are of interest."""
        if rounds and tracer.reached(rounds[0]):
            tracer.span(name, began, targets[0].segments.keys if targets else (), round_=rounds[0])

    def answer(self, ready: Iterable[ParkedRequest]) -> list[Answer]:
        """Answer requests that need not wait. One that cannot be answered fails alone."""
        answers: list[Answer] = []
        alike: tuple[SharedFields, wire.Values] | None = None  # the last answer in rounds, and what has asked for it
        for parked in ready:
            request = parked.request
            shared = request.shared if isinstance(request, wire.Push) else None
            if alike is not None and alike[0] is shared and parked.error is None and parked.late == alike[1].missed:
                answers.append(Answer(parked.peer, request, alike[1].again(request.seq)))
                continue
            answer = self._answer_one(parked)
            answers.append(answer)
            if shared is not None and self._rule.mode == "sync" and isinstance(answer.reply, wire.Values):
                alike = shared, answer.reply
        return answers

    def _answer_one(self, parked: ParkedRequest) -> Answer:
        if parked.error is not None:
            return refuse(parked.peer, parked.request, parked.error)
        try:
            return Answer(parked.peer, parked.request, self._reply(parked.request, parked.late))
        except (UsageError, WeightsInDoubt) as exc:
            return refuse(parked.peer, parked.request, exc)

    def resume(self) -> list[Answer]:
        """Answer the workers inside ``join``, if it is over."""
        ended = self._waiting.end_join()
        if ended is None:
            return []
        if ended.error is not None:
            return [refuse(peer, request, ended.error) for peer, request in ended.waiters]
        for target in self._buckets.targets():
            target.rounds.resume()
        return [
            Answer(peer, request, wire.Resume(request.seq, ended.last, self._buckets.versions(request.ids)))
            for peer, request in ended.waiters
        ]

    def _reply(self, message: WaitingRequest, late: int = 0) -> wire.Reply:
        if self._buckets.doubts:
            self._buckets.require_sound(message.ids)
        ahead = self._ahead(message) if self._rule.mode == "async" else 0
        if isinstance(message, OF_ARRAYS):
            return self._values.reply(message, late, ahead)
        if isinstance(message, OF_ROWS):
            return self._tables.reply(message, late, ahead)
        if isinstance(message, wire.FreezeTable):
            return self._tables.freezes.freeze(message, self._buckets.table(message.id))
        self._tables.evict(message)
        return wire.Ack(message.seq)

    def _ahead(self, message: WaitingRequest) -> int:
        """Return how many pushes the asker is ahead of the slowest worker."""
        if not message.ids:
            return 0
        if len(message.ids) == 1:
            return max(0, message.clocks[0] - self._buckets.target(message.ids[0]).rounds.version)
        clock = max(message.clocks)
        return max(0, clock - min(target.rounds.version for target in self._buckets.targets_of(message.ids)))
