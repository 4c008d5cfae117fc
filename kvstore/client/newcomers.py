"""Workers that were started again come in: what the newcomer does, and what its sponsor does that lets it in.

A newcomer runs its program from the beginning. Keys, values, optimizers and barriers are there already, and sums from
before training have the results that the others have had. Before its first push to what servers update, it asks the
scheduler to be let in, and waits. Its sponsor, one of the others, is told with which segment that push begins. Before
its own next push that begins so, the sponsor tells the servers of all its stores how often it has pushed everything,
and waits for their answers: no server can have closed a later round, and each knows whose pushes later rounds need. The
newcomer takes over the sponsor's clocks, and what is attached to the stores as shared. So both go on at one place of
their programs. What is attached goes through the scheduler if it is small, else through the servers, which keep it
until the newcomer has it.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvstore import wire
from kvstore.checkpoint.stateful import packed, unpacked
from kvstore.client.checkpointing import Checkpointing
from kvstore.client.entries import Entries, PushClocks
from kvstore.client.optimizing import Optimizing
from kvstore.client.pack import sendable
from kvstore.client.publishing import Publishing
from kvstore.client.push_pull import Pushes
from kvstore.client.requests import Joining, Requests, WorkerBarriers
from kvstore.errors import KVStoreError, UsageError, WireError
from kvstore.member.outstanding import Question, ready
from kvstore.member.session import Session
from kvstore.spec import ITEMSIZE
from kvstore.values import to_buffer
from kvstore.values.any_arrays import Column

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_STATE = 1 << 20  # bytes of what is attached, beyond which it goes through the servers
PAGE = 8 << 20  # bytes of it in one message
_ALIGNED = 16  # the address of each part is a multiple, so that any dtype can be read from it


class Mailbox:
    """Carries what is too large for the scheduler from a sponsor to a newcomer: pages of bytes, on servers in turn."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def send(self, rank: int, incarnation: int, parts: Sequence[Any]) -> tuple[int, list[int]]:
        """Put bytes on the servers for one newcomer; return the number of this hand-over, and their sizes."""
        number = secrets.randbits(62)
        sizes = [memoryview(part).nbytes for part in parts]
        starts, total = _starts(sizes)
        whole = np.zeros(total, np.uint8)
        for start, size, part in zip(starts, sizes, parts, strict=True):
            if size:
                whole[start : start + size] = np.frombuffer(part, np.uint8)
        memory = self._requests.session.client
        for few in self._few(total):
            self._ask(
                "letting a worker in",
                wire.KeepState,
                {
                    page: {
                        "rank": rank,
                        "incarnation": incarnation,
                        "number": number,
                        "part": page,
                        "buffers": [sendable(whole[page * PAGE : (page + 1) * PAGE], memory)],
                    }
                    for page in few
                },
            )
        return number, sizes

    def receive(self, number: int, sizes: Sequence[int]) -> list[Any]:
        """Return the bytes for which ``send`` has returned this. The servers keep them no more.

        Raises:
            NodeLost: they are not all there: a server that had some was lost.
        """
        starts, total = _starts(sizes)
        whole = np.empty(total, np.uint8)
        for few in self._few(total):
            wanted = {page: {"number": number, "part": page} for page in few}
            for page, reply in self._ask("coming back", wire.TakeState, wanted).items():
                part = whole[page * PAGE : (page + 1) * PAGE]
                if [memoryview(each).nbytes for each in reply.buffers] != [len(part)]:
                    raise WireError(f"expected {len(part)} bytes of what this worker takes over in {reply}")
                part[:] = np.frombuffer(reply.buffers[0], np.uint8)
        self._ask("coming back", wire.DropState, {server: {} for server in range(len(self._requests.session.servers))})
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _few(self, total: int) -> Iterator[range]:
        """Yield the numbers of pages, one for each server at a time."""
        pages, servers = -(-total // PAGE), len(self._requests.session.servers)
        for first in range(0, pages, servers):
            yield range(first, min(first + servers, pages))

    def _ask(
        self, what: str, kind: type[wire.Request], fields: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, wire.StatePart]:
        """Send a request for each page to its server; return the replies by page."""
        session, operation = self._requests.session, self._requests.operation(what)
        replies: dict[int, wire.StatePart] = {}
        questions = [
            Question(
                *(session.servers[page % len(session.servers)], operation, kind, own),
                partial(replies.__setitem__, page),
            )
            for page, own in fields.items()
        ]
        session.client.exchange(operation, ready, questions)
        return replies


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where parts of these sizes begin, and where the last one ends."""
    ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    return [0, *ends][: len(sizes)], ends[-1]


class Part(NamedTuple):
    """One store, as far as a newcomer takes it over."""

    requests: Requests
    entries: Entries
    clocks: PushClocks
    barriers: WorkerBarriers
    joining: Joining
    optimizing: Optimizing
    publishing: Publishing

    def first_ids(self) -> Column:
        """Return the first segment of each key, in the order in which this worker has them."""
        entries = self.entries
        return entries.ids[entries.firsts[: len(entries)]]


class _Passed(NamedTuple):
    """Where a worker is in one store."""

    barriers: int
    joins: int
    clocks: dict[int, int]  # by the first segment of each key


class Newcomers:
    """What one worker process does so that workers can come back: it may be a newcomer, and a sponsor of others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._parts: dict[int, Part] = {}  # by store
        self._attached: dict[str, Any] = {}  # shared, by name
        # What the sponsor has said, by store, of those that this worker makes later, too; and of other things.
        self._places: dict[int, _Passed] = {}
        self._state: Mapping[str, Any] = {}
        self._callbacks: dict[int, list[Callable[[list[int]], object]]] = {}  # by store: who hears of new members
        self._members: list[int] = []  # that they have heard of
        self._admitted: dict[int, int] = {}  # by rank, the incarnation that this worker has let in last
        self.step_ended = False  # whether a step is over, and nobody has been let in since
        self.handing_over = False  # whether states of what is attached are given or taken now

    def add(self, part: Part, checkpoints: Checkpointing | None, pushes: Pushes) -> None:
        """Take part for a new store."""
        self._parts[part.requests.store] = part
        self._take_over(part)
        pushes.before.append(lambda places: self._before(part, checkpoints, pushes, places))

    def remove(self, part: Part) -> None:
        self._parts.pop(part.requests.store, None)
        self._callbacks.pop(part.requests.store, None)

    def call(self, part: Part, callback: Callable[[list[int]], object]) -> None:
        """Call ``callback`` with the members at the next boundary at which this worker knows of others than now."""
        self._members = self._members or self._session.members
        self._callbacks.setdefault(part.requests.store, []).append(callback)

    def attach(self, name: str, thing: Any) -> bool:
        """Have newcomers take over the state of ``thing``; return whether it has been taken over here."""
        self._attached[name] = thing
        known = name in self._state.get("attached", {})
        if known:
            with self._handing_over():
                thing.load_state_dict(self._state["attached"][name])
        return known

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        self.handing_over = True
        try:
            yield
        finally:
            self.handing_over = False

    def take_clocks(self, part: Part) -> None:
        """Have the sponsor's clocks of the keys that are known here. May be repeated."""
        place = self._places.get(part.requests.store)
        if place is None:
            return
        pushed = part.clocks.pushed
        for at, number in enumerate(part.first_ids().tolist()):
            pushed[at] = max(int(pushed[at]), place.clocks.get(number, 0))

    def enter(self, part: Part, first: int, checkpoints: Checkpointing | None) -> None:
        """Be let in, before a push that begins with segment ``first`` of a store, or between two steps if that is -1.

        A worker that is in does nothing.
        """
        if not self._session.newcomer:
            return
        requests = part.requests
        told: wire.Entered = requests.one(
            self._session.scheduler, "coming back", (), wire.Enter, store=requests.store, id=first
        )
        self._session.client.alone(self._entered, told, _decoded(told.state, Mailbox(requests)))
        with self._handing_over():
            for name, state in self._state["attached"].items():
                if name in self._attached:
                    self._attached[name].load_state_dict(state)
        if checkpoints is not None:
            checkpoints.come(*self._state["checkpoints"])

    def _entered(self, told: wire.Entered, state: Mapping[str, Any]) -> None:
        self._places, self._state = _told(told), state
        for part in self._parts.values():
            self._take_over(part)
        self._session.newcomer = False

    def _take_over(self, part: Part) -> None:
        """Go on in one store as the sponsor did."""
        store = part.requests.store
        place = self._places.get(store)
        if place is None:
            return
        self.take_clocks(part)
        of_store = self._state["stores"][str(store)]
        part.barriers.pass_to(place.barriers)
        part.joining.number = place.joins
        part.publishing.number = max(part.publishing.number, of_store["versions"])
        part.optimizing.take_over(of_store["optimizing"])

    def boundary(self, part: Part, checkpoints: Checkpointing | None) -> None:
        """This worker is between two steps: let newcomers in that wait for that, or be let in."""
        self.step_ended = False
        self.enter(part, -1, checkpoints)
        self._meet(part, -1, checkpoints)
        self._tell_members()

    def end_step(self) -> None:
        """A step is over: ``begin_step``, or the next push to what servers update, lets newcomers in."""
        # Not here: the program has not counted the step yet, nor moved its schedules.
        self.step_ended = True
        self._tell_members()

    def begin_step(self, part: Part, checkpoints: Checkpointing | None) -> None:
        """Let newcomers in that wait for a boundary, if a step is over and nobody has been let in since."""
        if self.step_ended:
            self._meet(part, -1, checkpoints)
            self.step_ended = False

    def _tell_members(self) -> None:
        if self._callbacks and self._session.members != self._members:
            self._members = self._session.members
            for callback in [each for of_store in self._callbacks.values() for each in of_store]:
                callback(list(self._members))

    # ---- the sponsor

    def _before(self, part: Part, checkpoints: Checkpointing | None, pushes: Pushes, places: Column) -> None:
        session = self._session
        if self.step_ended and (pushes.rule.mode == "async" or part.optimizing.optimizer is not None):
            self.begin_step(part, checkpoints)
        if not session.newcomer and not session.to_admit and not session.short:
            return
        first = int(part.entries.ids[part.entries.firsts[places[0]]]) if len(places) else -1
        if session.newcomer:
            if pushes.rule.mode == "async" or part.optimizing.rule() is not None:
                self.enter(part, first, checkpoints)
            return
        self._meet(part, first, checkpoints)

    def _meet(self, part: Part, first: int, checkpoints: Checkpointing | None) -> None:
        """Let in those that wait for this place, which is that of ``enter``; stand still here below the least."""
        # Only one worker stands still: rounds need its pushes, so the others come no further. If they stood still, too,
        # the one that a newcomer waits for at a later place could not get there.
        session = self._session
        while True:
            for notice in list(session.to_admit.values()):
                if notice.id == first and (first == -1 or notice.store == part.requests.store):
                    if self._admitted.get(notice.rank, 0) < notice.incarnation:  # else it has been said again
                        self._admit(part, notice, self._described(part, notice, checkpoints))
                    if session.to_admit.get(notice.rank) is notice:
                        del session.to_admit[notice.rank]
            if not session.short or session.to_admit:
                return
            told: wire.GoOn = part.requests.one(session.scheduler, "waiting for enough workers", (), wire.AwaitWorkers)
            if told.rank < 0:
                return
            session.to_admit[told.rank] = wire.Newcomer(told.rank, told.incarnation, told.store, told.id)

    def _admit(self, part: Part, notice: wire.Newcomer, state: str) -> None:
        """Let a newcomer into the rounds after those that this worker has pushed, with this ``state``."""
        rank, incarnation = notice.rank, notice.incarnation
        # This worker may have been told of stores and keys that it has not made yet. Their clocks are still right: none
        # of their rounds is over without this worker.
        places = dict(self._places)
        for store, each in self._parts.items():
            pushed = each.clocks.pushed[: len(each.entries)]
            self._tell_servers(each, notice, pushed)
            known = places[store].clocks if store in places else {}
            clocks = known | dict(zip(each.first_ids().tolist(), pushed.tolist(), strict=True))
            places[store] = _Passed(each.barriers.passed, each.joining.number, clocks)
        fields = {"rank": rank, "incarnation": incarnation, "state": state}
        part.requests.one(
            self._session.scheduler, "letting a worker in", (), wire.Admitted, **fields, **_columns(places)
        )
        self._admitted[rank] = incarnation

    def _tell_servers(self, part: Part, notice: wire.Newcomer, pushed: Column) -> None:
        entries, servers = part.entries, len(self._session.servers)
        count = entries.segments
        clocks = np.repeat(pushed, entries.counts[: len(entries)])
        fields: dict[int, Mapping[str, Any]] = {}
        for server in range(servers):
            own = np.flatnonzero(entries.servers[:count] == server)
            fields[server] = {
                "rank": notice.rank,
                "incarnation": notice.incarnation,
                "ids": entries.ids[:count][own].tolist(),
                "clocks": clocks[own].tolist(),
            }
        part.requests.each("letting a worker in", (), wire.Admit, fields)

    def _described(self, part: Part, notice: wire.Newcomer, checkpoints: Checkpointing | None) -> str:
        """Return what the newcomer must know beside clocks: versions, rates, what is attached, the next checkpoint."""
        stores = dict(self._state.get("stores", {})) | {
            str(store): {"versions": part.publishing.number, "optimizing": part.optimizing.changed()}
            for store, part in self._parts.items()
        }
        following = None if checkpoints is None else checkpoints.following()
        told = {"stores": stores, "attached": {}, "checkpoints": following}
        try:
            with self._handing_over():
                attached = {name: it.state_dict() for name, it in self._attached.items()}
            tensors, text = packed({**told, "attached": attached})
        except UsageError as exc:
            log.warning("a worker that comes back begins without what is attached to the stores: %s", exc)
            tensors, text = packed(told)
        buffers = {name: to_buffer(tensor) for name, tensor in tensors.items()}
        forms = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
        if len(text) + sum(map(len, buffers.values())) > MOST_STATE:
            parts = [json.dumps([text, forms]).encode(), *buffers.values()]
            number, sizes = Mailbox(part.requests).send(notice.rank, notice.incarnation, parts)
            return json.dumps({"number": number, "sizes": sizes})
        coded = {name: [*forms[name], base64.b64encode(bytes(buffer)).decode()] for name, buffer in buffers.items()}
        return json.dumps([text, coded])


def _columns(places: Mapping[int, _Passed]) -> dict[str, list[int]]:
    return {
        "stores": list(places),
        "barriers": [place.barriers for place in places.values()],
        "joins": [place.joins for place in places.values()],
        "counts": [len(place.clocks) for place in places.values()],
        "ids": [number for place in places.values() for number in place.clocks],
        "clocks": [clock for place in places.values() for clock in place.clocks.values()],
    }


def _told(message: wire.Entered) -> dict[int, _Passed]:
    pairs = zip(message.ids, message.clocks, strict=True)
    stores = zip(message.stores, message.barriers, message.joins, message.counts, strict=True)
    return {
        store: _Passed(barriers, joins, dict(itertools.islice(pairs, count)))
        for store, barriers, joins, count in stores
    }


def _decoded(text: str, mailbox: Mailbox) -> Mapping[str, Any]:
    """Return what ``_described`` has said at another worker. ``WireError`` says that it is damaged."""
    told = _checked(lambda: json.loads(text))
    if isinstance(told, dict):
        head, *parts = mailbox.receive(*_checked(lambda: (int(told["number"]), list(map(int, told["sizes"])))))
        return _checked(lambda: _state(json.loads(bytes(head)), parts))
    return _checked(lambda: _state(told, None))


def _checked(make: Callable[[], T]) -> T:
    try:
        return make()
    except (ArithmeticError, AttributeError, KVStoreError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise WireError(f"what the worker says that lets this one in is damaged: {exc}") from None


def _state(told: Any, parts: Sequence[Any] | None) -> Mapping[str, Any]:
    """Return the state that was ``told``, whose tensors are in ``parts``, or else in their forms."""
    text, forms = told
    if parts is None:
        parts = [bytearray(base64.b64decode(data, validate=True)) for *_, data in forms.values()]
    described = zip(forms.items(), parts, strict=True)
    decoded = unpacked({name: _tensor(dtype, shape, part) for (name, (dtype, shape, *_)), part in described}, text)
    if decoded.keys() != {"stores", "attached", "checkpoints"}:
        raise ValueError(f"it has {sorted(decoded)}")
    return cast(Mapping[str, Any], decoded)


def _tensor(dtype: str, shape: list[int], data: Any) -> torch.Tensor:
    if dtype not in ITEMSIZE:
        raise ValueError(f"{dtype!r:.40} is no dtype")
    kind = getattr(torch, dtype)
    if not len(data):
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(data, dtype=kind).reshape(shape)


_OF: WeakKeyDictionary[Session, Newcomers] = WeakKeyDictionary()


def newcomers(session: Session) -> Newcomers | None:
    """Return what this worker process does so that workers can come back; None where the job ends without them."""
    if not session.config.min_workers:
        return None
    made = _OF.get(session)
    if made is None:
        made = _OF[session] = Newcomers(session)
    return made
