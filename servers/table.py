"""One store's segments on one server: what pushes and pulls do to them. No I/O, no clock.

``sync``: a push is a contribution to a round; when a round is complete its sum is assigned, or handed to the optimizer,
and whoever waits for it is answered. ``async``: every push is an update, at once. All segments that one message
completes are updated by one call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from kvstore.errors import AlreadyInitialised, KeyNotInitialised, Mismatch, NodeLost, UsageError
from kvstore.optim import Optimizer, log_replaced
from kvstore.spec import Key, Spec, require_floats
from kvstore.tickets import shorten
from kvstore.updater import Updater
from kvstore.values import from_buffer, spec_of, sum_in_order, to_buffer
from kvstore.wire import Ack, GetStates, Init, Pull, Push, PutStates, Reply, States, Values, join, tear
from servers.replies import Answer, refuse
from servers.rounds import Rounds
from servers.slot import Contribution, Parked, Slot

Hyper = tuple[float | None, float | None]


class Table:
    """The segments of one store.

    Args:
        mode: ``sync`` or ``async``.
        workers: the ranks of the job's workers.
    """

    def __init__(self, mode: str, workers: Collection[int]) -> None:
        self.mode = mode
        self.slots: dict[int, Slot] = {}
        self.updater: Updater | None = None
        self._workers = frozenset(workers)
        self._departed: frozenset[int] = frozenset()
        self._parked: dict[tuple[int, int], Parked] = {}

    def init(self, message: Init) -> None:
        """Take new segments and their first values."""
        for number in message.ids:
            if number in self.slots:
                raise AlreadyInitialised(f"key {self.slots[number].key!r} is initialised already")
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
        parts = tear(message.buffers, [spec.nbytes for spec in specs])
        for number, key, spec, part in zip(message.ids, message.keys, specs, parts, strict=True):
            value = from_buffer(part, spec.dtype).clone().view(spec.shape)
            self.slots[number] = Slot(number, key, spec, value, Rounds(self._workers))

    def push(self, peer: bytes, message: Push) -> list[Answer]:
        """Take a worker's contributions, and answer whoever they complete."""
        slots = self._find(message.ids)
        parts = tear(message.buffers, [slot.spec.nbytes for slot in slots])
        if self.updater is not None:
            require_floats((slot.key, slot.spec) for slot in slots)
        elif self.mode == "async":
            raise UsageError("a push to an async store needs an optimizer: call set_optimizer(name, ...) first")
        hyper = (message.lr, message.rescale)
        values = [
            from_buffer(part, slot.spec.dtype).view(slot.spec.shape) for slot, part in zip(slots, parts, strict=True)
        ]
        if self.mode == "async":
            for slot in slots:
                slot.rounds.version += 1
            self._update([(slot, value, hyper) for slot, value in zip(slots, values, strict=True)])
            return self._park(peer, message, slots)
        for slot, clock, value in zip(slots, message.clocks, values, strict=True):
            slot.rounds.contribute(message.rank, clock, Contribution(message.node, value, hyper))
        parked = self._park(peer, message, slots)  # before the rounds are over, for it too must learn of their errors
        return parked + self._complete(slots)

    def pull(self, peer: bytes, message: Pull) -> list[Answer]:
        """Answer with values now, or when the rounds they must include are complete."""
        return self._park(peer, message, self._find(message.ids))

    def read(self, message: Pull) -> Reply:
        """Return current values, whatever rounds they include."""
        return self._answer(message)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with ``optimizer`` from now on; the state stays if the rule is the same."""
        if self.updater is not None and optimizer.same_rule(self.updater.optimizer):
            self.updater.configure(optimizer)
            return
        new = Updater(optimizer)
        require_floats((slot.key, slot.spec) for slot in self.slots.values())
        log_replaced(self.updater.optimizer if self.updater is not None else None, optimizer)
        self.updater = new

    def get_states(self, message: GetStates) -> States:
        """Return the optimizer's states of some segments."""
        self._find(message.ids)
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
        slots = self._find(dict.fromkeys(message.ids))
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
        parts = tear(message.buffers, [spec.nbytes for spec in specs])
        states: dict[tuple[Key, str], torch.Tensor] = {
            (number, name): from_buffer(part, spec.dtype).view(spec.shape)
            for number, name, spec, part in zip(message.ids, message.names, specs, parts, strict=True)
        }
        for slot in slots:
            _require_fitting(slot, self.updater.optimizer, states)
        self.updater.load_states(states, {slot.id: slot.writable() for slot in slots})

    def depart(self, workers: Collection[int]) -> list[Answer]:
        """Note who has left in order; requests that wait for them will wait for ever, so they fail."""
        self._departed = frozenset(workers)
        answers: list[Answer] = []
        for parked in list(self._parked.values()):
            answers += self._give_up(parked)
        return answers

    def explain(self, rank: int, about: int) -> str:
        """Say what request ``about`` of worker ``rank`` waits for."""
        parked = self._parked.get((rank, about))
        if parked is None:
            return ""
        return f"waits for {self._missing(parked.request, self._workers)}"

    # ---- helpers

    def _find(self, ids: Iterable[int]) -> list[Slot]:
        try:
            return [self.slots[number] for number in ids]
        except KeyError as exc:
            raise KeyNotInitialised(f"segment {exc} has no value on this server; call init first") from None

    def _park(self, peer: bytes, message: Push | Pull, slots: Sequence[Slot]) -> list[Answer]:
        if self.mode == "async":
            return [Answer(peer, message, self._answer(message))]
        parked = Parked(peer, message)
        for slot, clock in zip(slots, message.clocks, strict=True):
            if slot.rounds.version < clock:
                slot.parked.append((clock, parked))
                parked.left += 1
        if not parked.left:
            return [Answer(peer, message, self._answer(message))]
        self._parked[message.rank, message.seq] = parked
        return self._give_up(parked)

    def _give_up(self, parked: Parked) -> list[Answer]:
        """Fail a request that waits for workers that have left."""
        if not self._departed:
            return []
        missing = self._missing(parked.request, self._departed)
        if not missing:
            return []
        del self._parked[parked.request.rank, parked.request.seq]
        for slot in self._find(parked.request.ids):
            slot.parked = [entry for entry in slot.parked if entry[1] is not parked]
        return [refuse(parked.peer, parked.request, NodeLost(f"{missing}, has left the job"))]

    def _complete(self, touched: Sequence[Slot]) -> list[Answer]:
        answers: list[Answer] = []
        while wave := [(slot, items) for slot in touched if (items := slot.rounds.complete()) is not None]:
            errors = self._apply(wave)
            for slot, _ in wave:
                for parked in slot.release(errors.get(slot.id)):
                    del self._parked[parked.request.rank, parked.request.seq]
                    if parked.error is not None:
                        answers.append(refuse(parked.peer, parked.request, parked.error))
                    else:
                        answers.append(Answer(parked.peer, parked.request, self._answer(parked.request)))
        return answers

    def _apply(self, wave: Sequence[tuple[Slot, list[Contribution]]]) -> dict[int, Exception]:
        """Sum and update; return the errors by segment. A round that fails is over all the same: none can repeat it."""
        errors: dict[int, Exception] = {}
        updates: list[tuple[Slot, torch.Tensor, Hyper]] = []
        for slot, items in wave:
            try:
                hyper = _agreed(slot.key, items)
            except Mismatch as exc:
                errors[slot.id] = exc
                continue
            updates.append((slot, sum_in_order([item.value for item in items], reuse=True), hyper))
        try:
            self._update(updates)
        except Exception as exc:
            errors |= {slot.id: exc for slot, _, _ in updates}
        return errors

    def _update(self, updates: Sequence[tuple[Slot, torch.Tensor, Hyper]]) -> None:
        if self.updater is None:
            for slot, total, _ in updates:
                slot.assign(total)
            return
        # A round's numbers come from its contributions, not from whatever other round was complete before it.
        default = self.updater.optimizer if self.mode == "sync" else self.updater
        by_hyper: dict[Hyper, list[tuple[Key, torch.Tensor, torch.Tensor]]] = {}
        for slot, total, hyper in updates:
            by_hyper.setdefault(hyper, []).append((slot.id, slot.writable(), total))
        for (lr, rescale), items in by_hyper.items():
            self.updater.lr = default.lr if lr is None else lr
            self.updater.rescale_grad = default.rescale_grad if rescale is None else rescale
            self.updater.update(items, lambda number: self.slots[number].key)  # type: ignore[index]

    def _answer(self, message: Push | Pull) -> Reply:
        if isinstance(message, Push) and not message.want:
            return Ack(message.seq)
        lasting = self.updater is None
        return Values(message.seq, buffers=join([slot.readable(lasting=lasting) for slot in self._find(message.ids)]))

    def _missing(self, message: Push | Pull, among: Collection[int]) -> str:
        """Name the workers ``among`` those given for whose pushes a request waits, with keys and rounds."""
        waits: dict[int, tuple[int, list[Key]]] = {}
        for slot, clock in zip(self._find(message.ids), message.clocks, strict=True):
            for rank, first in slot.rounds.missing(clock).items():
                if rank in among:
                    waits.setdefault(rank, (first, []))[1].append(slot.key)
        return "; ".join(
            f"worker {rank}, whose push {first} of {shorten(dict.fromkeys(keys))} is missing"
            for rank, (first, keys) in sorted(waits.items())
        )


def _require_fitting(slot: Slot, optimizer: Optimizer, states: Mapping[tuple[Key, str], torch.Tensor]) -> None:
    """Raise ``Mismatch`` unless the states are such as the optimizer makes itself: torch's fused steps do not check."""
    model = Updater(optimizer)
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


def _agreed(key: Key, items: Sequence[Contribution]) -> Hyper:
    """Return the hyper-parameters of a round: those that any worker gave, on which all who gave some must agree."""
    if all(item.hyper == items[0].hyper for item in items):
        return items[0].hyper
    agreed: list[float | None] = []
    for which, name in enumerate(("learning rate", "rescale_grad")):
        given = {item.node.rank: item.hyper[which] for item in items if item.hyper[which] is not None}
        if len(set(given.values())) > 1:
            words = ", ".join(f"{value:g} on worker {rank}" for rank, value in given.items())
            raise Mismatch(f"workers disagree on the {name} for the same round of {key!r}: {words}")
        agreed.append(next(iter(given.values()), None))
    return agreed[0], agreed[1]
