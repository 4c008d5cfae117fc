"""One store's segments on one server: what pushes and pulls do to them. No I/O, no clock.

``sync``: a push is a contribution to a round; when a round is complete its sum is assigned, or handed to the optimizer,
and whoever waits for it is answered. ``async``: every push is an update, at once; whoever is too far ahead of others
waits with its next read. All buckets that one message completes are updated by one call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvstore.consistency import Rule
from kvstore.errors import Mismatch, NodeLost, UsageError
from kvstore.memory import Heap, Memory
from kvstore.optim import Optimizer, log_replaced
from kvstore.spec import Key, Spec, require_floats
from kvstore.tickets import shorten
from kvstore.updater import Group, Updater
from kvstore.values import Part, cut, from_buffer, runs_of, spec_of, sum_runs, to_buffer
from kvstore.wire import (
    Ack,
    Buffer,
    GetStates,
    Init,
    Pause,
    Pull,
    Push,
    PutStates,
    Reply,
    Resume,
    States,
    Values,
    join,
    tear,
)
from servers.bucket import Bucket, Contribution, Hyper, Parked, Progress, Slot
from servers.buckets import Buckets
from servers.clocks import Clocks
from servers.pauses import Pauses
from servers.replies import Answer, refuse
from servers.rounds import Rounds
from servers.squeeze import Squeezed, contribution, described


class Table:
    """The segments of one store.

    Args:
        rule: how updates and reads go together.
        workers: the ranks of the job's workers.
        memory: where values live.
    """

    def __init__(self, rule: Rule, workers: Collection[int], memory: Memory | None = None) -> None:
        rule.require_workers(len(workers))
        self.rule = rule
        self._memory = memory or Heap()
        self.buckets = Buckets(self._progress, self._memory)
        self.updater: Updater | None = None
        self.pauses = Pauses()
        self._groups: WeakKeyDictionary[Bucket, Group] = WeakKeyDictionary()
        self._workers = frozenset(workers)
        self._departed: frozenset[int] = frozenset()
        self._parked: dict[tuple[int, int], Parked] = {}
        self._squeezed = Squeezed()

    def init(self, message: Init) -> None:
        """Take new segments and their first values."""
        specs = [Spec(tuple(shape), message.dtype) for shape in message.shapes]
        runs = runs_of(message.buffers, message.dtype, sum(spec.size for spec in specs))
        self.buckets.add(message.ids, message.keys, specs, runs)

    def push(self, peer: bytes, message: Push) -> list[Answer]:
        """Take a worker's contributions, and answer whoever they complete."""
        self.pauses.require_before(message)
        buckets = self.buckets.pushed(message.ids, message.clocks)
        runs = self._payload(message, buckets)
        hyper = self._hyper(message)
        if self.updater is not None:
            require_floats((bucket.slots[0].key, bucket.slots[0].spec) for bucket in buckets)
        elif self.rule.mode == "async":
            raise UsageError("a push to an async store needs an optimizer: call set_optimizer(name, ...) first")
        updates: list[tuple[Bucket, list[Contribution], Hyper]] = []
        start = at = late = 0
        for bucket in buckets:
            contribution = Contribution(message.node, cut(runs, start, start + bucket.size), hyper)
            updates.append((bucket, [contribution], hyper))
            if not bucket.rounds.contribute(message.rank, message.clocks[at], contribution):
                late += len(bucket.ids)
            start += bucket.size
            at += len(bucket.ids)
        if self.rule.mode == "async":
            self._update(updates)
        if self.rule.quorum is None:
            late = 0
        parked = self._park(peer, message, late)  # before rounds are over, for it too must learn of their errors
        return parked + self._advance(buckets) + self._resume()

    def pull(self, peer: bytes, message: Pull) -> list[Answer]:
        """Answer with values now, or when the rounds they must include are complete."""
        return self._park(peer, message)

    def read(self, message: Pull) -> Reply:
        """Return current values, whatever rounds they include."""
        return self._answer(message)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with ``optimizer`` from now on; the state stays if the rule is the same."""
        self._groups.clear()
        if self.updater is not None and optimizer.same_rule(self.updater.optimizer):
            self.updater.configure(optimizer)
            return
        new = Updater(optimizer, self._key)
        require_floats((slot.key, slot.spec) for slot in self.buckets)
        log_replaced(self.updater.optimizer if self.updater is not None else None, optimizer)
        self.updater = new

    def get_states(self, message: GetStates) -> States:
        """Return the optimizer's states of some segments."""
        for number in message.ids:
            self.buckets.find(number)
        states = self.updater.states(message.ids) if self.updater is not None else {}
        tensors = [value.detach().contiguous().clone() for value in states.values()]
        return States(
            message.seq,
            optimizer=self.updater.optimizer.name if self.updater is not None else None,
            ids=[int(number) for number, _ in states],
            names=[name for _, name in states],
            shapes=[list(value.shape) for value in tensors],
            dtypes=[str(value.dtype).removeprefix("torch.") for value in tensors],
            buffers=join([to_buffer(value) for value in tensors]),
        )

    def put_states(self, message: PutStates) -> None:
        """Take the optimizer's states of some segments."""
        if self.updater is None:
            raise UsageError("the servers have no optimizer whose state this could be; call set_optimizer first")
        slots = [self.buckets.slot(number) for number in dict.fromkeys(message.ids)]
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
        parts = tear(message.buffers, [spec.nbytes for spec in specs])
        states: dict[tuple[Key, str], torch.Tensor] = {
            (number, name): from_buffer(part, spec.dtype).view(spec.shape)
            for number, name, spec, part in zip(message.ids, message.names, specs, parts, strict=True)
        }
        for slot in slots:
            _require_fitting(slot, self.updater.optimizer, states)
        for bucket in self.buckets.of(message.ids):
            bucket.writable()
        self._groups.clear()
        self.updater.load_states(states, {slot.id: slot.value for slot in slots})

    def depart(self, workers: Collection[int]) -> list[Answer]:
        """Note who has left in order; requests that wait for them fail, or are answered, if that is the rule."""
        self._departed = frozenset(workers)
        buckets = self.buckets.all()
        for bucket in buckets:
            bucket.rounds.leave(self._departed)
        return self._advance(buckets) + self._despair()

    def pause(self, peer: bytes, message: Pause) -> list[Answer]:
        """Do without a worker in rounds that it has not pushed for; it is answered when all workers have paused."""
        for number in message.ids:
            self.buckets.find(number)
        clocks = self.pauses.add(peer, message)
        buckets = self.buckets.apart(clocks)
        for bucket in buckets:
            if bucket.ids[0] in clocks:
                bucket.rounds.pause(message.rank, clocks[bucket.ids[0]])
        return self._advance(buckets) + self._despair()

    def explain(self, rank: int, about: int) -> str:
        """Say what request ``about`` of worker ``rank`` waits for."""
        parked = self._parked.get((rank, about))
        if parked is None:
            return self.pauses.explain(rank, about, self._workers)
        return f"waits for {self._missing(parked.request, lambda *_: True)}"

    # ---- helpers

    def _key(self, number: Key) -> Key:
        return self.buckets.slot(int(number)).key

    def _hyper(self, message: Push) -> Hyper:
        """The hyper-parameters of a push.

        Raises:
            UsageError, UnknownName: the optimizer cannot go on with them.
        """
        if not message.changes:
            return Hyper(message.lr, message.rescale)
        changes = {
            (number, name): tuple(value) if isinstance(value, list) else value
            for number, name, value in message.changes
        }
        if self.updater is None:
            raise UsageError("hyper-parameters for a store without an optimizer; call set_optimizer first")
        self.updater.optimizer.require_changes(changes)
        return Hyper(message.lr, message.rescale, tuple(sorted(changes.items())))

    def _payload(self, message: Push, buckets: Sequence[Bucket]) -> Sequence[Part]:
        if not buckets:
            return []
        compression = described(message.codec)
        if compression is not None:
            return contribution(message, compression, buckets)
        return runs_of(message.buffers, buckets[0].dtype, sum(bucket.size for bucket in buckets))

    def _progress(self) -> Progress:
        if self.rule.mode == "async":
            made: Clocks[Contribution] = Clocks(self._workers)
            made.leave(self._departed)
            return made
        rounds: Rounds[Contribution] = Rounds(self._workers, 0, self.rule.quorum, self.rule.late == "keep")
        rounds.leave(self._departed)
        return rounds

    def _park(self, peer: bytes, message: Push | Pull, late: int = 0) -> list[Answer]:
        parked = Parked(peer, message, late)
        for bucket, clock in self._waits(message):
            if bucket.rounds.version < clock:
                bucket.parked.append((clock, parked))
                parked.left += 1
        if not parked.left:
            return [Answer(peer, message, self._answer(message, late))]
        self._parked[message.rank, message.seq] = parked
        return self._give_up(parked)

    def _waits(self, message: Push | Pull) -> list[tuple[Bucket, int]]:
        """Return the buckets of a request, and the round of each that it wants to be over."""
        if self.rule.mode == "async" and isinstance(message, Push) and not message.want:
            return []  # it has taken effect
        buckets = self.buckets.of(message.ids)
        clocks = _distinct(message.clocks)
        if len(clocks) == 1:
            return [(bucket, self.rule.needs(clocks[0])) for bucket in buckets]
        latest = dict.fromkeys(buckets, 0)
        for number, clock in zip(message.ids, message.clocks, strict=True):
            bucket, _ = self.buckets.find(number)
            latest[bucket] = max(latest[bucket], self.rule.needs(clock))
        return list(latest.items())

    def _despair(self) -> list[Answer]:
        """Fail, or answer, whoever waits for workers that have left, or pause."""
        return [answer for parked in list(self._parked.values()) for answer in self._give_up(parked)] + self._resume()

    def _give_up(self, parked: Parked) -> list[Answer]:
        """Fail a request that waits for workers that have left, or that pause and do not know what they should push."""
        error: Exception
        if self._departed and (missing := self._missing(parked.request, lambda rank, _: rank in self._departed)):
            error = NodeLost(f"{missing}, has left the job")
        elif self.pauses.ranks and (missing := self._missing(parked.request, self._ignorant)):
            error = UsageError(f"{missing}, has joined without having initialised it")
        else:
            return []
        del self._parked[parked.request.rank, parked.request.seq]
        for bucket in self.buckets.of(parked.request.ids):
            bucket.parked = [entry for entry in bucket.parked if entry[1] is not parked]
        return [refuse(parked.peer, parked.request, error)]

    def _ignorant(self, rank: int, segment: int) -> bool:
        return rank in self.pauses.ranks and not self.pauses.knows(rank, segment)

    def _resume(self) -> list[Answer]:
        """If all workers have paused, and what they had pushed before is in, let them go on."""
        paused = self.pauses.ranks
        if not paused:
            return []
        missing = self._workers - paused
        gone = missing & self._departed
        if gone and self.rule.mode == "sync" and self.rule.quorum is None:
            names = ", ".join(f"worker {rank}" for rank in sorted(gone))
            error = NodeLost(f"{names} has left the job without join()")
            return [refuse(peer, request, error) for peer, request in self.pauses.end()]
        buckets = self.buckets.all()
        if missing - gone or not all(bucket.rounds.settled for bucket in buckets):
            return []
        for bucket in buckets:
            bucket.rounds.resume()
        last = self.pauses.last
        return [
            Answer(peer, request, Resume(request.seq, last, self._clocks(request)))
            for peer, request in self.pauses.end()
        ]

    def _advance(self, touched: Sequence[Bucket]) -> list[Answer]:
        """Answer whoever waits for what these buckets are now ready for."""
        return self._complete(touched) if self.rule.mode == "sync" else self._release(touched, {})

    def _complete(self, touched: Sequence[Bucket]) -> list[Answer]:
        answers: list[Answer] = []
        while wave := [(bucket, items) for bucket in touched if (items := bucket.rounds.complete()) is not None]:
            answers += self._release([bucket for bucket, _ in wave], self._apply(wave))
        return answers

    def _release(self, buckets: Sequence[Bucket], errors: Mapping[Bucket, Exception]) -> list[Answer]:
        """Answer whoever waits for nothing more now that these buckets are where they are."""
        answers: list[Answer] = []
        for bucket in buckets:
            for parked in bucket.release(errors.get(bucket)) if bucket.parked else ():
                del self._parked[parked.request.rank, parked.request.seq]
                if parked.error is not None:
                    answers.append(refuse(parked.peer, parked.request, parked.error))
                else:
                    answers.append(Answer(parked.peer, parked.request, self._answer(parked.request, parked.late)))
        return answers

    def _apply(self, wave: Sequence[tuple[Bucket, list[Contribution]]]) -> dict[Bucket, Exception]:
        """Sum and update; return the errors. A round that fails is over all the same: none can repeat it."""
        errors: dict[Bucket, Exception] = {}
        updates: list[tuple[Bucket, list[Contribution], Hyper]] = []
        for bucket, items in wave:
            try:
                updates.append((bucket, items, _agreed(bucket, items)))
            except Mismatch as exc:
                errors[bucket] = exc
        try:
            self._update(updates)
        except Exception as exc:
            errors |= {bucket: exc for bucket, _, _ in updates}
        return errors

    def _update(self, updates: Sequence[tuple[Bucket, list[Contribution], Hyper]]) -> None:
        if self.updater is None:
            for bucket, items, _ in updates:
                bucket.assign([item.runs for item in items])
                if (scale := self._scale(bucket, items)) != 1 and bucket.value.is_floating_point():
                    bucket.value.mul_(scale)
            return
        # A round's numbers come from its contributions, not from whatever other round was complete before it.
        default = self.updater.optimizer if self.rule.mode == "sync" else self.updater
        by_hyper: dict[Hyper, list[tuple[Bucket, list[Contribution]]]] = {}
        for bucket, items, hyper in updates:
            by_hyper.setdefault(hyper, []).append((bucket, items))
        for (lr, rescale, changes), members in by_hyper.items():
            self.updater.lr = default.lr if lr is None else lr
            self.updater.rescale_grad = default.rescale_grad if rescale is None else rescale
            self.updater.changes = dict(changes)
            self._step(self.updater, members)

    def _step(self, updater: Updater, members: Sequence[tuple[Bucket, list[Contribution]]]) -> None:
        groups: list[Group] = []
        totals: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for bucket, items in members:
            bucket.writable()
            group = self._groups.get(bucket)
            if group is None:
                group = updater.group(bucket.ids, [slot.value for slot in bucket.slots])
                self._groups[bucket] = group
            total = self._corrected(updater, bucket, items, group.params[0].dtype)
            groups.append(group)
            totals.append(total)
            grads += bucket.split(total)
        updater.step(groups, grads, totals)

    def _corrected(
        self, updater: Updater, bucket: Bucket, items: Sequence[Contribution], dtype: torch.dtype
    ) -> torch.Tensor:
        """The gradient to update a bucket with."""
        total = self._total(updater, bucket, items).to(dtype)
        if (scale := self._scale(bucket, items)) != 1:
            total = total * scale
        before = bucket.read_by.get(items[0].node.rank) if self.rule.compensation else None
        if before is None:
            return total
        # What others have changed since, by the gradient's square for its curvature.
        drift = bucket.value.to(dtype) - before.to(dtype)
        return total + self.rule.compensation * updater.rescale_grad * total * total * drift

    def _scale(self, bucket: Bucket, items: Sequence[Contribution]) -> float:
        """What makes a sum over fewer, or more, contributions than the round is of workers stand for all of them."""
        rounds = bucket.rounds
        return rounds.share / len(items) if self.rule.quorum is not None and isinstance(rounds, Rounds) else 1.0

    def _total(self, updater: Updater, bucket: Bucket, items: Sequence[Contribution]) -> torch.Tensor:
        """The sum of ``items``, to be overwritten; or the only one's own memory, if it will not be."""
        if len(items) == 1 and len(items[0].runs) == 1 and updater.reads_only():
            return items[0].runs[0].values
        # From where values are, which is the same memory in every round: fresh pages cost more than the sum.
        total = from_buffer(self._memory.allocate(bucket.size * bucket.value.itemsize), bucket.dtype)
        sum_runs([item.runs for item in items], total)
        return total

    def _answer(self, message: Push | Pull, late: int = 0) -> Reply:
        if isinstance(message, Push) and not message.want:
            return Ack(message.seq, late)
        if self.rule.compensation:
            for bucket in self.buckets.of(message.ids):
                bucket.remember(message.rank)
        back = described(message.back)
        lengths: list[int] = []
        if back is None:
            spans = self.buckets.spans(message.ids)
            buffers: Sequence[Buffer] = [bucket.readable(start, stop) for bucket, start, stop in spans]
        else:
            places = [self.buckets.find(number) for number in message.ids]
            lengths, buffers = self._squeezed.answer(places, back, feedback=self.updater is None)
        return Values(
            message.seq,
            self._clocks(message) if self.rule.quorum is not None else [],
            self._ahead(message) if self.rule.mode == "async" else 0,
            late,
            lengths,
            buffers,
        )

    def _clocks(self, message: Push | Pull | Pause) -> list[int]:
        return [self.buckets.find(number)[0].rounds.version for number in message.ids]

    def _ahead(self, message: Push | Pull) -> int:
        """How far the asker is ahead of the slowest."""
        if not message.ids:
            return 0
        clock = max(message.clocks)
        return max(0, clock - min(bucket.rounds.version for bucket in self.buckets.of(message.ids)))

    def _missing(self, message: Push | Pull, among: Callable[[int, int], bool]) -> str:
        """Name the workers for whose pushes a request waits, with keys and rounds, if ``among(rank, segment)``."""
        waits: dict[int, tuple[int, list[Key]]] = {}
        for number, clock in zip(message.ids, message.clocks, strict=True):
            bucket, place = self.buckets.find(number)
            for rank, first in bucket.rounds.missing(self.rule.needs(clock)).items():
                if among(rank, number):
                    waits.setdefault(rank, (first, []))[1].append(bucket.slots[place].key)
        return "; ".join(
            f"worker {rank}, whose push {first} of {shorten(dict.fromkeys(keys))} is missing"
            for rank, (first, keys) in sorted(waits.items())
        )


def _require_fitting(slot: Slot, optimizer: Optimizer, states: Mapping[tuple[Key, str], torch.Tensor]) -> None:
    """Raise ``Mismatch`` unless the states are such as the optimizer makes itself: torch's fused steps do not check."""
    model = Updater(optimizer, lambda _: slot.key)
    model.update([(slot.id, torch.zeros_like(slot.value), torch.zeros_like(slot.value))])
    wanted = {name: spec_of(value) for (_, name), value in model.states([slot.id]).items()}
    given = {name: spec_of(value) for (number, name), value in states.items() if number == slot.id}
    if given != wanted:
        raise Mismatch(
            f"these are not {optimizer.name}'s states of key {slot.key!r}: "
            f"{_words(given)} were given, {_words(wanted)} belong there"
        )


def _words(specs: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in specs.items()) or "none"


def _agreed(bucket: Bucket, items: Sequence[Contribution]) -> Hyper:
    """Return the hyper-parameters of a round: those that any worker gave, on which all who gave some must agree."""
    if all(item.hyper == items[0].hyper for item in items):
        return items[0].hyper

    def one(name: str, values: Mapping[int, Any]) -> Any:
        given = {rank: value for rank, value in values.items() if value is not None}
        if len(set(given.values())) > 1:
            words = ", ".join(f"{_number(value)} on worker {rank}" for rank, value in given.items())
            keys = shorten(dict.fromkeys(slot.key for slot in bucket.slots))
            raise Mismatch(f"workers disagree on the {name} for the same round of {keys}: {words}")
        return next(iter(given.values()), None)

    changes = {item.node.rank: dict(item.hyper.changes) for item in items}
    return Hyper(
        one("learning rate", {item.node.rank: item.hyper.lr for item in items}),
        one("rescale_grad", {item.node.rank: item.hyper.rescale for item in items}),
        tuple(
            (
                (number, name),
                one(_words_of(number, name), {rank: its.get((number, name)) for rank, its in changes.items()}),
            )
            for number, name in sorted({which for its in changes.values() for which in its})
        ),
    )


def _words_of(number: int, name: str) -> str:
    return ("learning rate" if name == "lr" else name) + (f" of group {number - 1}" if number else "")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _distinct(clocks: Sequence[int]) -> list[int]:
    """The different ones among ``clocks``, which usually are all the same."""
    return [clocks[0]] if clocks and clocks.count(clocks[0]) == len(clocks) else list(dict.fromkeys(clocks))
