"""The requests of one store to the scheduler and the servers, apart from pushes and pulls.

Those of one call are here as methods; a worker's barriers and pauses, which span several calls, are classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore import wire
from kvstore.client.entries import Entries, Entry, PushClocks, Segment, SegmentColumns
from kvstore.client.pack import Packer
from kvstore.client.plans import Parcel, Plan
from kvstore.errors import DeadlineExceeded, KVStoreError, UsageError
from kvstore.lineage import new_lineage
from kvstore.member.outstanding import Effect, PendingRequest, Question, ready
from kvstore.member.session import Session
from kvstore.optim.optimizer import Optimizer
from kvstore.optim.states import SegmentState, StateTensors, pack_states, unpack_states
from kvstore.rule import Rule
from kvstore.shares import Share
from kvstore.spec import Key, Spec
from kvstore.table import TableSpec
from kvstore.ticket import Operation, WaitLimits
from kvstore.transport import Peer
from kvstore.values import Leaving


class Requests:
    """The requests of one store. Those that return no operation wait for the answer.

    Args:
        ordinal: which of this worker's stores it is: the n-th store of one worker is the n-th of the others.
        rule: how updates and reads go together; all servers are told.
        limits: of every wait.
        made: what the store is, and what makes it.
        place: where in the program; empty if workers may make it at different places.
    """

    def __init__(
        self, session: Session, ordinal: int, rule: Rule, limits: WaitLimits, made: str = "", place: str = ""
    ) -> None:
        self.session = session
        self._client = session.client
        self.limits = limits
        self.ordinal, self.rule = ordinal, rule
        self.packer = Packer(session.client)
        fields = {"ordinal": ordinal, "made": made, "place": place, "name": session.store_names.get(ordinal, "")}
        opened: wire.StoreOpened = self.one(session.scheduler, "opening the store", (), wire.OpenStore, **fields)
        self.store = opened.store  # its number on the wire
        self._all("opening the store", wire.Open, store=self.store, lineage=new_lineage(), **rule.described)

    def close(self) -> None:
        """Tell the servers and the aggregator, then the scheduler, that this worker does not use the store any more."""
        self._all("closing the store", wire.Close, store=self.store)
        self.one(self.session.scheduler, "closing the store", (), wire.CloseStore, store=self.store)

    def declare(
        self, keys: Sequence[Key], kinds: Sequence[int], specs: Sequence[Spec], bound: int, longest: int
    ) -> tuple[Entries, bool]:
        """Have new keys placed (rank 0), or wait until rank 0's values of them are on the servers.

        Returns:
            Where they are; and whether this worker gives them their first values: rank 0 or, if that is lost, another.
        """
        placed: wire.Placed = self.one(
            self.session.scheduler,
            "init",
            keys,
            wire.Declare,
            store=self.store,
            keys=list(keys),
            kinds=list(kinds),
            shapes=[list(spec.shape) for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            bound=bound,
            longest=longest,
            tables=[spec.table.described if isinstance(spec, TableSpec) else None for spec in specs],
        )
        columns = (placed.counts, placed.ids, placed.servers, placed.starts, placed.stops)
        segments = SegmentColumns(*(np.array(column, np.int64) for column in columns))
        if (aggregator := self.session.aggregator) is not None:
            self._describe(aggregator, keys, kinds, specs, segments)
        return Entries.of(keys, kinds, specs, segments), placed.first or self.session.gives

    def _describe(
        self, aggregator: Peer, keys: Sequence[Key], kinds: Sequence[int], specs: Sequence[Spec], placed: SegmentColumns
    ) -> None:
        """Tell the aggregator where arrays are, before it is given anything of them. It takes no part in tables."""
        tables = np.array([isinstance(spec, TableSpec) for spec in specs], bool)
        arrays = ~tables[np.array(kinds, np.int64)]
        if not arrays.any():
            return
        of_arrays = np.repeat(arrays, placed.counts)
        fields = {
            "keys": [key for key, is_array in zip(keys, arrays.tolist(), strict=True) if is_array],
            "kinds": np.array(kinds, np.int64)[arrays].tolist(),
            "counts": placed.counts[arrays].tolist(),
            "ids": placed.ids[of_arrays].tolist(),
            "servers": placed.servers[of_arrays].tolist(),
            "sizes": (placed.stops - placed.starts)[of_arrays].tolist(),
        }
        self.one(
            aggregator,
            "init",
            keys,
            wire.Describe,
            store=self.store,
            shapes=[list(spec.shape) for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            **fields,
        )

    def put_values(self, plan: Plan, values: Leaving) -> None:
        under_way: deque[Operation] = deque()
        nbytes = AHEAD
        try:
            for parcel in plan.parcels:
                if nbytes >= AHEAD:
                    # All at once, a large model would take its size in messages, on pages that are touched once: that
                    # takes longer than all copies.
                    while len(under_way) > 1:
                        under_way[0].wait()
                        under_way.popleft()
                    under_way.append(self.operation("init", plan.keys))
                    nbytes = 0
                nbytes += parcel.nbytes
                operation, peer = under_way[-1], self.session.servers[parcel.server]
                question = Question(peer, operation, wire.Init, partial(self._first_values, parcel, values))
                self._client.submit(operation, ready, [question])
            while under_way:
                under_way[0].wait()
                under_way.popleft()
        finally:
            for operation in under_way:
                self._client.give_up(operation)

    def _first_values(self, parcel: Parcel, values: Leaving) -> dict[str, Any]:
        kinds, shapes = parcel.shapes()
        listed = {"ids": parcel.ids, "keys": parcel.keys(), "kinds": kinds, "shapes": shapes, "dtype": parcel.dtype}
        return {"store": self.store, **listed, "buffers": self.packer.pack(parcel, values)}

    def ready(self, keys: Sequence[Key], effect: Effect) -> None:
        """Report keys ready, which other workers may use from then on; this has ``effect``."""
        operation = self.operation("init", keys)
        fields = {"store": self.store, "keys": list(keys)}
        question = Question(self.session.scheduler, operation, wire.Ready, fields)
        self._client.exchange(operation, ready, [question], effect)

    def set_optimizer(self, version: int, optimizer: Optimizer, effect: Effect) -> None:
        """Have all servers update with ``optimizer``; when the last of them does, ``effect`` follows."""
        fields = {
            "store": self.store,
            "version": version,
            "name": optimizer.name,
            "hyper": [[name, value] for name, value in optimizer.hyper.items()],
            "clip_gradient": optimizer.clip_gradient,
            "lr_mult": [[key, value] for key, value in optimizer.lr_mult.items()],
            "wd_mult": [[key, value] for key, value in optimizer.wd_mult.items()],
            "lr": optimizer.lr,
            "rescale": optimizer.rescale_grad,
            "groups": [[list(group.keys), [[*pair] for pair in group.hyper.items()]] for group in optimizer.groups],
        }
        operation = self.operation("set_optimizer")
        questions = [_Last(peer, operation, wire.SetOptimizer, fields, effect) for peer in self.session.servers]
        self._client.exchange(operation, ready, questions)

    def take_share(self, **asked: Any) -> Share:
        taken = self.one(self.session.scheduler, "taking samples", (), wire.TakeShare, **asked)
        return Share(taken.first, taken.end, taken.over)

    def optimizer(self) -> str | None:
        reply: wire.OptimizerStates = self.one(
            self.session.servers[0], "asking for the optimizer", (), wire.GetStates, store=self.store, ids=[]
        )
        return reply.optimizer

    def get_states(self, parcel: Parcel, aggregator: Peer | None = None) -> dict[tuple[Segment, str], torch.Tensor]:
        """Return the optimizer's states of a parcel's segments, by (segment, name of the state)."""
        reply: wire.OptimizerStates = self.one(
            aggregator or self.session.servers[parcel.server],
            "save_optimizer_states",
            (),
            wire.GetStates,
            store=self.store,
            ids=parcel.ids,
        )
        by_id = {segment.id: segment for segment in parcel.segments}
        return {(by_id[number], name): value for number, name, value in unpack_states(reply)}

    def put_states(
        self, server: int, states: Mapping[tuple[Segment, str], torch.Tensor], aggregator: Peer | None = None
    ) -> None:
        by_id = (SegmentState(segment.id, name, value) for (segment, name), value in states.items())
        self.one(
            aggregator or self.session.servers[server],
            "load_optimizer_states",
            (),
            wire.PutStates,
            store=self.store,
            **pack_states(by_id),
        )

    def one(self, peer: bytes, what: str, keys: Iterable[Key], kind: type[wire.Request], /, **fields: Any) -> Any:
        """Ask ``peer``, and return the reply."""
        operation = self.operation(what, keys)
        return self._client.exchange(operation, ready, [Question(peer, operation, kind, fields, operation.take)])

    def each(
        self, what: str, keys: Iterable[Key], kind: type[wire.Request], fields: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Any]:
        """Ask several servers at once, each with fields of its own besides the store; return the replies, by server."""
        operation = self.operation(what, keys)
        replies: dict[int, Any] = {}
        questions = [
            Question(
                self.session.servers[server],
                operation,
                kind,
                {"store": self.store, **own},
                partial(replies.__setitem__, server),
            )
            for server, own in fields.items()
        ]
        self._client.exchange(operation, ready, questions)
        return replies

    def _all(self, what: str, kind: type[wire.Request], /, **fields: Any) -> None:
        operation = self.operation(what)
        aggregator = self.session.aggregator
        peers = [*self.session.servers, *([] if aggregator is None else [aggregator])]
        questions = [Question(peer, operation, kind, fields) for peer in peers]
        self._client.exchange(operation, ready, questions)

    def operation(self, what: str, keys: Iterable[Key] = ()) -> Operation:
        return Operation(what, list(keys), self._client, limits=self.limits)


class _Last(Question):
    """One of several questions; the last one that is answered well has an effect."""

    __slots__ = ("effect",)

    def __init__(
        self, peer: bytes, operation: Operation, kind: type[wire.Request], fields: Mapping[str, Any], effect: Effect
    ) -> None:
        super().__init__(peer, operation, kind, fields)
        self.effect = effect

    def take(self, reply: wire.Reply) -> Effect | None:
        # Looks at what is open, and counts nothing: an answer may be taken twice.
        return self.effect if self.operation.open == {self.seq} and self.operation.error is None else None


# ---- optimizer states of whole arrays, and of the segments that servers hold

AHEAD = 32 << 20  # bytes of first values; twice as many at most are on their way
AT_ONCE = 64 << 20  # bytes of values whose states go in one message, which may have 2^16 frames


def assemble(segments: Mapping[tuple[Segment, str], torch.Tensor], entries: Mapping[Key, Entry]) -> StateTensors:
    """Join the states of segments into those of whole arrays, as if one server held everything."""
    by_state: dict[tuple[Key, str], list[tuple[Segment, torch.Tensor]]] = {}
    for (segment, name), value in segments.items():
        by_state.setdefault((segment.key, name), []).append((segment, value))
    whole: StateTensors = {}
    for (key, name), parts in by_state.items():
        parts.sort(key=lambda part: part[0].start)
        values = [value for _, value in parts]
        if len(values) > 1 and values[0].dim():
            whole[key, name] = torch.cat([value.reshape(-1) for value in values]).view(entries[key].spec.shape)
        else:  # one segment, or a number that all segments have alike (a step count)
            whole[key, name] = values[0]
    return whole


def cut(states: StateTensors, entries: Mapping[Key, Entry]) -> dict[tuple[Segment, str], torch.Tensor]:
    """Cut the states of whole arrays into those of their segments; the inverse of ``assemble`` for any placement."""
    segments: dict[tuple[Segment, str], torch.Tensor] = {}
    for (key, name), value in states.items():
        entry = entries[key]
        for segment in entry.segments:
            if not entry.cut or not value.dim():
                segments[segment, name] = value
            elif value.numel() == entry.spec.size:
                segments[segment, name] = value.reshape(-1)[segment.start : segment.stop]
            else:
                raise UsageError(f"{name} of key {key!r} cannot be cut over {entry.servers} servers")
    return segments


# ---- barriers and pauses


class _Barrier(NamedTuple):
    """How many barriers a worker has passed, and the operation of the one that it waits at."""

    passed: int = 0
    operation: Operation | None = None


class WorkerBarriers:
    """The barriers that one worker comes to, one after the other.

    An exception may end any call here; the next one waits on at the same barrier.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._at = _Barrier()

    @property
    def passed(self) -> int:
        return self._at.passed

    def pass_to(self, number: int) -> None:
        """Go on as one that has passed so many barriers."""
        self._at = _Barrier(number)

    def wait(self) -> None:
        """Come to the next barrier, and return when all workers have come."""
        passed, operation = self._at
        if operation is None:
            requests = self._requests
            operation = requests.operation("barrier")
            fields = {"store": requests.store, "number": passed + 1}
            question = Question(requests.session.scheduler, operation, wire.Barrier, fields)
            # Noted with the request: if an exception ends this call, the next one waits for the same answer.
            arrived = partial(self._arrived, operation)
            requests.session.client.submit(operation, ready, [question], arrived)
        try:
            operation.wait()
        except UsageError:
            self._at = _Barrier(passed)
            raise
        self._at = _Barrier(passed + 1)

    def _arrived(self, operation: Operation) -> None:
        self._at = self._at._replace(operation=operation)


class Joining:
    """The pauses of one worker in one store: each lasts from ``join`` until all servers let the worker go on.

    An exception may end any call here; the next ``join`` continues from that point.
    """

    def __init__(self, requests: Requests, clocks: PushClocks) -> None:
        self._requests = requests
        self._clocks = clocks
        self.number = 0  # of the last pause. One that comes later has its sponsor's.
        self._operation: Operation | None = None  # of the one that is under way
        self._last = 0
        self._rounds: dict[int, int] = {}  # by segment: where its rounds are when the worker goes on

    @property
    def under_way(self) -> bool:
        return self._operation is not None

    def begin(self, entries: Entries) -> None:
        """Announce a pause to the scheduler, then to the servers. Nothing may be pushed from here to ``end``."""
        requests, number = self._requests, self.number + 1
        # The scheduler is asked first and alone: it must know of the pause before any server lets others go on.
        fields = {"store": requests.store, "number": number, "pushes": 0, "ids": [], "clocks": []}
        requests.one(requests.session.scheduler, "join", (), wire.Pause, **fields)
        requests.session.client.submit(requests.operation("join"), self._pauses, number, entries)

    def _pauses(self, operation: Operation, number: int, entries: Entries) -> tuple[Sequence[PendingRequest], Effect]:
        """Return what tells all servers, and the aggregator, that this worker has nothing more to contribute."""
        session = self._requests.session
        clocks: list[dict[int, int]] = [{} for _ in session.servers]  # by server, of its segments
        of_arrays: dict[int, int] = {}  # the aggregator takes no part in tables
        pushes = 0
        for key, entry in entries.items():
            clock = int(self._clocks.pushed[entry.place])
            pushes += clock
            for segment in entry.segments:
                clocks[segment.server][segment.id] = clock
                if key not in entries.tables:
                    of_arrays[segment.id] = clock
        fields: dict[str, Any] = {"store": self._requests.store, "number": number, "pushes": pushes}
        questions = [
            Question(
                peer,
                operation,
                wire.Pause,
                {**fields, "ids": list(pushed), "clocks": list(pushed.values())},
                partial(self._take, list(pushed)),
            )
            for peer, pushed in zip(session.servers, clocks, strict=True)
        ]
        if (aggregator := session.aggregator) is not None:
            fields |= {"ids": list(of_arrays), "clocks": list(of_arrays.values())}
            questions.append(Question(aggregator, operation, wire.Pause, fields))
        return questions, partial(self._begun, number, operation)

    def _begun(self, number: int, operation: Operation) -> None:
        # Noted together with the requests: an exception before this leaves no pause here and none on the servers, one
        # after it leaves both, and the next ``join`` waits for the same answers.
        self._rounds = {}
        self.number = number
        self._operation = operation

    def wait(self, timeout: float | None) -> None:
        """Return when all servers let this worker go on. After ``DeadlineExceeded`` the pause goes on."""
        if self._operation is None:
            return
        try:
            self._operation.wait(timeout)
        except DeadlineExceeded:
            raise  # the pause goes on: the servers have noted it
        except KVStoreError:
            self._operation = None
            raise

    def level(self, entries: Mapping[Key, Entry]) -> None:
        """Bring servers that are behind others to the round at which this worker goes on.

        All servers are at one round, with one exception: a worker pushed alone while all others had joined, and died
        before its pushes were at every server. A server that lacks them would wait for pushes that nobody makes.
        """
        rule, session = self._requests.rule, self._requests.session
        if rule.mode != "sync" or rule.quorum is not None or not session.config.min_workers:
            return
        behind: dict[int, dict[str, list[int]]] = {}
        for entry in entries.values():
            known = {each: self._rounds[each.id] for each in entry.segments if each.id in self._rounds}
            reached = max(known.values(), default=0)
            for segment, clock in known.items():
                if clock < reached:
                    fields = behind.setdefault(segment.server, {"ids": [], "clocks": []})
                    fields["ids"].append(segment.id)
                    fields["clocks"].append(reached)
        if behind:
            self._requests.each("join", (), wire.PassRounds, behind)

    def end(self, entries: Mapping[Key, Entry]) -> int:
        """Move the clocks up to the rounds that others have made meanwhile; return the rank that joined last."""
        rule = self._requests.rule
        self._clocks.resume(list(entries.values()), self._rounds, rule.mode == "sync" and rule.quorum is None)
        self._operation = None
        return self._last

    def _take(self, ids: Sequence[int], reply: wire.Resume) -> None:
        self._last = reply.last
        self._rounds.update(zip(ids, reply.clocks, strict=True))
