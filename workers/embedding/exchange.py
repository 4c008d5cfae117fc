"""What the modules of one store do together: one message has the rows of all their tables.

Without a trainer a backward pass pushes once, for all tables, with no rows for a table that it has not reached: workers
must agree on how often they have pushed. It does so as soon as all rows that forward passes took have their gradients,
or else when it ends. Under ``paused`` gradients add up instead. Where a trainer has the store, its step pushes, for
only then is it known what the step divides gradients by.

Frozen tables are left out. Workers must agree on that, too, so the first push after a table was frozen says so.

A sparse gradient has a row for each position of a batch. The rows of one id are summed when all have come, for all
tables at once, in the order of the look-up: with one worker the bits are those of ``coalesce``, which would sort the
positions again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from kvstore import AlreadyInitialized, KVStore, RowSparse, Unsupported, UsageError
from kvstore.dynamo import outside_graphs
from kvstore.table import Table
from kvstore.values import as_dtype, summed_in
from workers.common.row_steps import RowPushes, row_steps
from workers.common.torch_internals import after_backward, current_backward, raise_late
from workers.embedding.lookups import Fetch, Lookup, TableIds, fetches_of, joined_positions, look_up_all, sort_for

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

FROZEN = 0.0  # the factor that a push asks for which says that its tables are frozen; see ``_say_frozen``


Arrive = Callable[[torch.Tensor], None]


@dataclass(eq=False)
class RowUse:
    """One forward pass through a table: the rows that it took. Their gradient comes once in each backward pass.

    ``course`` is a number that is another one after the table was loaded: what the rows were part of.
    """

    key: Any
    lookup: Lookup
    course: int = 0


class Part(NamedTuple):
    """The gradient of the rows ``ids``: a row for each; or, where ``lookup`` is given, one for each position."""

    ids: torch.Tensor
    rows: torch.Tensor
    lookup: Lookup | None = None
    course: int = 0


@dataclass
class RowGradients:
    """What has come so far.

    Attributes:
        parts: by key the gradients of its rows, in the order in which they came.
        awaited: uses whose gradient has not come since the last push, as long as their graphs live.
        backward: the number of the backward pass that runs; None between two.
        kept: how many parts of each key are from backward passes that have ended.
    """

    parts: dict[Any, list[Part]] = field(default_factory=dict)
    awaited: weakref.WeakSet[RowUse] = field(default_factory=weakref.WeakSet)
    backward: int | None = None
    kept: dict[Any, int] = field(default_factory=dict)

    def begin(self, backward: int) -> bool:
        """Note that backward pass ``backward`` makes gradients; return whether that is new."""
        if self.backward == backward:
            return False
        self.forget_unfinished()
        self.backward = backward
        return True

    def end(self) -> None:
        self.backward = None
        if self.parts:  # what stays is to take no more memory than it must
            _sum_positions(self.parts.values())
        self.kept = {key: len(parts) for key, parts in self.parts.items()}

    def forget_unfinished(self) -> None:
        """Drop what has come from a backward pass that has failed."""
        if self.backward is None:
            return
        self.backward = None
        for key, parts in self.parts.items():
            del parts[self.kept.get(key, 0) :]

    def add(self, use: RowUse, grad: torch.Tensor) -> None:
        self.awaited.discard(use)
        lookup = use.lookup
        ids, count = lookup.ids, len(lookup.ids)
        if grad.layout == torch.strided:
            part = Part(ids, grad[:count].cpu(), None, use.course)
        elif grad.is_cpu and not lookup.padded and torch.equal(grad._indices()[0], lookup.inverse.reshape(-1)):
            part = Part(ids, grad._values(), lookup, use.course)
        else:
            summed = _wide(grad).coalesce()
            touched = summed.indices()[0].cpu()
            part = Part(ids if len(touched) == count else ids[touched], summed.values().cpu(), None, use.course)
        self.parts.setdefault(use.key, []).append(part)

    def add_bags(self, use: RowUse, grad: torch.Tensor) -> None:
        """Note the gradient of the sums of bags that have the same number of ids: a row for each bag."""
        self.awaited.discard(use)
        lookup = use.lookup
        rows = grad.repeat_interleave(lookup.inverse.shape[1], 0)
        self.parts.setdefault(use.key, []).append(Part(lookup.ids, rows, lookup, use.course))

    def drop(self) -> None:
        self.parts, self.kept = {}, {}

    def drop_earlier(self, courses: Mapping[Any, int]) -> list[Any]:
        """Drop the gradients of rows that are part of another course now; return the keys of which there were some."""
        earlier = [key for key, parts in self.parts.items() if any(part.course != courses[key] for part in parts)]
        for key in earlier:
            self.parts[key] = [part for part in self.parts[key] if part.course == courses[key]]
        return earlier

    def take(self, tables: dict[Any, Table]) -> list[RowSparse]:
        """Return the gradient of each of ``tables``, perhaps of no rows, and begin anew."""
        parts, self.parts, self.kept = self.parts, {}, {}
        self.awaited.clear()
        _sum_positions(parts.values())
        return [_joined(parts.get(key, []), table) for key, table in tables.items()]

    def __bool__(self) -> bool:
        return any(self.parts.values())


def _sum_positions(parts: Iterable[list[Part]]) -> None:
    """Replace each part that has rows of positions by one with their sums."""
    alike: dict[tuple[int, torch.dtype], list[tuple[int, list[Part], int]]] = {}
    for of_key in parts:
        for place, part in enumerate(of_key):
            if part.lookup is not None:
                group = alike.setdefault((part.rows.shape[1], part.rows.dtype), [])
                group.append((part.lookup.number, of_key, place))
    for group in alike.values():
        group.sort(key=itemgetter(0))  # backward comes to them in another order than the look-up
        unsummed = [of_key[place] for _, of_key, place in group]
        for (_, of_key, place), rows in zip(group, _sums(unsummed), strict=True):
            of_key[place] = of_key[place]._replace(rows=rows, lookup=None)


def _sums(parts: Sequence[Part]) -> Sequence[torch.Tensor]:
    """Return the sums of several parts' rows, which are as wide, in the dtype of sums.

    A bag sums one row after the other.
    """
    positions = joined_positions([part.lookup for part in parts if part.lookup is not None])
    rows = parts[0].rows if len(parts) == 1 else torch.cat([part.rows for part in parts])
    summed = functional.embedding_bag(positions.order, _wide(rows), positions.starts, mode="sum")
    return torch.split(summed, positions.counts)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` in the dtype in which they are summed; torch would sum half precision in itself."""
    return rows.to(summed_in(rows.dtype))


def _joined(parts: list[Part], table: Table) -> RowSparse:
    if not parts:
        return RowSparse.zeros((0, table.width), table.dtype)
    if len(parts) == 1:
        (ids, rows, *_) = parts[0]
    else:
        ids, rows = torch.cat([part.ids for part in parts]), torch.cat([_wide(part.rows) for part in parts])
    return RowSparse.over(ids, rows if table.dtype == table.sum_dtype else rows.to(as_dtype(table.dtype)))


def watched(
    rows: torch.Tensor, weight: torch.Tensor, arrive: Arrive, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``rows``, or the sums of bags of them. Each backward pass calls ``arrive`` with their gradient.

    ``weight`` requires a gradient, and gets none. ``places``, of shape (bags, ids of each), says which rows a bag has.
    """
    result: torch.Tensor = _Watched.apply(weight, rows.detach(), places, arrive)  # type: ignore[no-untyped-call]
    return result


class _Watched(torch.autograd.Function):
    # A leaf with a hook would do for one pass. But its ``grad`` would add up over backward passes of one graph, and the
    # sum of a sparse and a dense gradient is dense. A function sees each pass's gradient by itself.
    @staticmethod
    def forward(
        ctx: Any, _weight: torch.Tensor, rows: torch.Tensor, places: torch.Tensor | None, arrive: Arrive
    ) -> Any:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)  # rows that the loss does not depend on would get a gradient of zeros
        return rows.detach() if places is None else functional.embedding_bag(places, rows, mode="sum")

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            ctx.arrive(grad)
        return None, None, None, None


class Ahead:
    """What one ``lookahead`` has asked for.

    Attributes:
        ready: by key the rows of the batch that is trained; none that lack a push.
        wanted: by key which rows of a later batch the next push asks for; empty for none.
        asked: by key the rows of the later batch, as the last push has asked for them.
    """

    def __init__(self) -> None:
        self.ready: dict[Any, Fetch] = {}
        self.wanted: dict[Any, Lookup] = {}
        self.asked: dict[Any, Fetch] = {}

    def begin(self, ready: dict[Any, Fetch], wanted: dict[Any, Lookup]) -> None:
        self.ready, self.wanted, self.asked = ready, wanted, {}


class RowExchange(RowPushes):
    """Pushes and pulls rows for the modules that have their tables in ``store``."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._tables: dict[Any, Table] = {}
        self._users: dict[Any, list[weakref.ref[nn.Module]]] = {}
        self._frozen: set[Any] = set()
        self._said_frozen: set[Any] = set()  # the frozen tables of which a push has told
        self._rescale: float | None = None
        self._fixed = False  # whether the program has given ``rescale_grad``
        self._pushed_to: dict[Any, int] = {}  # by table, how often this has pushed
        self._replaced = 0  # how often ``load_state_dict`` has replaced rows
        self._graded = False  # whether the trainer had gradients when the last backward pass ended
        self._gradients = RowGradients()
        self._resting = self._pushed = False
        # A second pass through a graph finds its uses no longer awaited. Counting them cannot tell the last gradient
        # then, so pushes wait for the end of backward from then on.
        self._retained = False  # whether a graph has made gradients twice
        self._ahead: list[Ahead] = []  # the lookaheads that are under way, the innermost last
        self._steps = row_steps(store)
        self._sort = sort_for(store.num_workers)
        self._lock = threading.RLock()  # hooks of tensors on different devices run in different threads

    @classmethod
    def of(cls, store: KVStore) -> RowExchange:
        """Return the one that all modules of ``store`` share."""
        steps = row_steps(store)
        if not isinstance(steps.pushes, cls):
            steps.pushes = cls(store)
        return steps.pushes

    def add(self, key: Any, table: Table, rescale_grad: float | None) -> None:
        """Make a table in the store, whose gradients are multiplied by ``rescale_grad``; on all workers."""
        rescale = 1.0 / self.store.num_workers if rescale_grad is None else float(rescale_grad)
        if self._rescale not in (None, rescale):
            raise UsageError(
                f"rescale_grad={rescale} of {key!r}, but other tables of this store have {self._rescale}: they are "
                "pushed together; give all modules of a store the same"
            )
        if key in self._tables:
            raise AlreadyInitialized(
                f"key {key!r} is the table of another module of this store: EmbeddingBag.of(module), or Embedding.of, "
                "makes a second module of its table"
            )
        self.store.init(key, table)
        self._rescale, self._fixed = rescale, self._fixed or rescale_grad is not None
        self._tables[key] = table
        self._users[key] = []
        self._pushed_to[key] = 0

    def use(self, key: Any, user: nn.Module) -> None:
        """Note a module that has the table ``key``: the first one, or a copy of it."""
        self._users[key] = [known for known in self._users[key] if known() is not None] + [weakref.ref(user)]

    def _trained(self) -> list[Any]:
        """Return the keys of the tables that some module trains."""
        for key, users in self._users.items():
            there = [user for user in [known() for known in users] if user is not None]
            if not there:  # a table whose modules have gone stays as they left it
                continue
            if all(user.frozen for user in there):
                self._frozen.add(key)
            elif self._frozen:
                self._frozen.discard(key)
        return [key for key in self._tables if key not in self._frozen] if self._frozen else list(self._tables)

    # ---- rows

    def rows(self, wanted: TableIds) -> tuple[Lookup, torch.Tensor]:
        """Return which rows ``wanted`` needs, and these with a row of zeros below them.

        They have been asked for by a ``lookahead``, or are pulled.
        """
        raise_late()
        key = wanted.key
        fetch = self._ahead[-1].ready.get(key) if self._ahead else None
        if fetch is not None and fetch.lookup.matches(wanted.given):
            lookup = fetch.lookup
        else:
            (lookup,) = self.look_up([wanted])
        if fetch is None or fetch.seen != self._seen(key) or not fetch.covers(lookup):
            fetch = self.pull({key: lookup})[key]
        return lookup, fetch.take(lookup)

    def look_up(self, wanted: Sequence[TableIds]) -> list[Lookup]:
        return look_up_all(wanted, self._sort)

    def pull(self, lookups: Mapping[Any, Lookup]) -> dict[Any, Fetch]:
        """Ask for rows, in one message; return at once."""
        fetches = self._fetches(lookups)
        if fetches:
            ids = [fetch.lookup.ids for fetch in fetches.values()]
            outs = [fetch.out for fetch in fetches.values()]
            ticket = self.store.row_sparse_pull(list(fetches), outs, row_ids=ids, wait=False)
            for fetch in fetches.values():
                fetch.ticket = ticket
        return fetches

    def _fetches(self, lookups: Mapping[Any, Lookup]) -> dict[Any, Fetch]:
        fetches = fetches_of(self._tables, lookups)
        for key, fetch in fetches.items():
            fetch.seen = self._seen(key)
        return fetches

    def _seen(self, key: Any) -> tuple[int, int]:
        """Return a mark of all changes of a table that are no pushes of this; rows of another mark may be old.

        What this pushes itself makes no rows old: a call that asks for rows says which pushes they are to have.
        """
        return self.store.table_changes(key).changes - self._pushed_to[key], self._replaced

    def _course(self, key: Any) -> int:
        """Return a number that another one follows when the table's rows are replaced by earlier ones."""
        return self.store.table_changes(key).loads + self._replaced

    # ---- gradients

    def watch(self, key: Any, lookup: Lookup, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``rows``, which have the row of zeros below them, so that their gradient is pushed."""
        use = self._awaited(key, lookup)
        return watched(rows, weight, partial(self._note, use, self._gradients.add))

    def bag_sums(self, key: Any, lookup: Lookup, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the sums of bags with as many ids each, without padding; their gradient is pushed."""
        use = self._awaited(key, lookup)
        return watched(rows, weight, partial(self._note, use, self._gradients.add_bags), lookup.inverse)

    def _awaited(self, key: Any, lookup: Lookup) -> RowUse:
        """Return a new use of rows, whose gradient is awaited as long as the use lives."""
        if current_backward() < 0:
            self._gradients.forget_unfinished()
            has_gradients = self._steps.trainer_has_gradients
            # Tables are no parameters of the trainer, so nobody tells them of ``model.zero_grad()``; a trainer without
            # gradients has had one.
            if self._graded and has_gradients is not None and not has_gradients():
                self.drop()  # the program has dropped the gradients of the step, by the model's zero_grad for example
        use = RowUse(key, lookup, self._course(key))
        self._gradients.awaited.add(use)
        return use

    def _note(self, use: RowUse, add: Callable[[RowUse, torch.Tensor], None], grad: torch.Tensor) -> None:
        with self._lock, torch.no_grad():
            if self._gradients.begin(current_backward()):
                after_backward(self._end)
            self._retained |= use not in self._gradients.awaited
            add(use, grad)
            if not (self._gradients.awaited or self._resting or self._retained or self._steps.trainer_has_gradients):
                self._push()

    def _end(self) -> None:
        with self._lock, torch.no_grad():
            self._gradients.end()
            has_gradients = self._steps.trainer_has_gradients
            if has_gradients is not None:
                self._graded = has_gradients()
            elif self._gradients and not self._resting:
                self._push()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def flush(self) -> None:
        """Push the gradients that have added up, for all tables; with none, push no rows. A trainer's step does it."""
        with self._lock, torch.no_grad():
            self._gradients.forget_unfinished()
            if self._steps.trainer_has_gradients is None:
                self._push()

    def drop(self) -> None:
        """Drop the gradients that have added up and wait for the step of a trainer."""
        with self._lock:
            if self._steps.trainer_has_gradients is not None:
                self._gradients.forget_unfinished()
                self._gradients.drop()
                self._graded = False

    def step_over(self) -> None:
        """Handle the end of a step of the store's trainer: what has not been pushed in it is pushed now."""
        raise_late()
        if self._steps.trainer_has_gradients is not None:
            with self._lock, torch.no_grad():
                self._gradients.forget_unfinished()
                # Where the trainer updates alone, the store may have no optimizer: then its tables are only read.
                if self._gradients or self._steps.rates is not None or self.store.num_workers > 1:
                    self._push()
                self._graded = False
            return
        if self._gradients or not self._pushed:
            self.flush()
        self._pushed = False

    def _factor(self) -> float:
        if self._fixed or self._rescale is None:
            return self._rescale or 0.0
        if self._steps.trainer_has_gradients is None or self._steps.scale is None:
            return self._rescale * self.store.rescale_grad
        # A trainer that updates on the store has one optimizer with the tables, and has taken its factor into account.
        return self._steps.scale if self._steps.rates is not None else self._steps.scale * self.store.rescale_grad

    def _push(self) -> None:
        keys = self._trained()
        if self._frozen != self._said_frozen:
            self._say_frozen()
        for key in self._gradients.drop_earlier({key: self._course(key) for key in self._gradients.parts}):
            log.warning("gradients of table %r are dropped: they are of rows that have been replaced since", key)
        values = self._gradients.take({key: self._tables[key] for key in keys})
        self._pushed = True
        if not keys:
            return
        if self._steps.rates is not None:
            self._steps.rates()
        ahead = self._ahead[-1] if self._ahead else None
        fetches: dict[Any, Fetch] = {}
        with self.store.rescaled(self._factor()):
            if ahead is None or not ahead.wanted:
                self.store.push(keys, values)
            else:
                fetches = self._push_and_ask(keys, values, ahead)
        for key in keys:
            self._pushed_to[key] += 1
        for key, fetch in fetches.items():
            fetch.seen = self._seen(key)
        for each in self._ahead:
            each.ready = {}  # they are of the round before

    def _push_and_ask(self, keys: Sequence[Any], values: Sequence[RowSparse], ahead: Ahead) -> dict[Any, Fetch]:
        """Push, and ask for the rows that are wanted next; return what comes back with the push."""
        wanted = {key: lookup for key, lookup in ahead.wanted.items() if key not in self._frozen}
        fetches = fetches_of(self._tables, wanted)
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        ids = [fetches[key].lookup.ids if key in fetches else nothing for key in keys]
        outs = [fetches[key].out if key in fetches else value.rows[:0] for key, value in zip(keys, values, strict=True)]
        ticket = self.store.pushpull(keys, values, outs, wait=False, row_ids=ids)
        for fetch in fetches.values():
            fetch.ticket = ticket
        others = {key: lookup for key, lookup in ahead.wanted.items() if key in self._frozen}
        ahead.asked = {**fetches, **self.pull(others)}
        return fetches

    def _say_frozen(self) -> None:
        """Tell of the tables that have been frozen since the last push, so that workers which disagree get an error.

        A worker that has not frozen a table pushes to it, and its round would wait for this worker until the deadline.
        So this worker takes part in one more round, without rows and with a factor that no other push has: servers
        refuse a round whose workers give different factors. Later rounds cost nothing.
        """
        new = [key for key in self._frozen if key not in self._said_frozen]
        rule = getattr(self.store, "rule", None)
        if new and self.store.num_workers > 1 and rule is not None and rule.mode == "sync":
            with self.store.rescaled(FROZEN):
                tables = (self._tables[key] for key in new)
                self.store.push(new, [RowSparse.zeros((0, table.width), table.dtype) for table in tables])
            for key in new:
                self._pushed_to[key] += 1
        self._said_frozen = set(self._frozen)

    # ---- lookahead

    @contextmanager
    def looking_ahead(self) -> Iterator[Ahead]:
        """Let pushes in this block ask for rows that are wanted next, and forward passes take them."""
        ahead = Ahead()
        self._ahead.append(ahead)
        try:
            yield ahead
        finally:
            self._ahead.remove(ahead)

    def forget(self) -> None:
        """Note that others have taken the place of all rows: what was asked for is pulled again."""
        self._replaced += 1

    def __deepcopy__(self, memo: Any) -> Self:
        """Copies of a module have the same table."""
        return self

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a module whose table is in a store cannot be pickled: save its state_dict(), which has the whole table, "
            "or the table itself with store.save_table"
        )
