"""What the modules of one store do together: one message has the rows of all their tables.

A backward pass pushes once, for all tables, those that it has not reached with no rows: workers must agree on how often
they have pushed. It does so as soon as all rows that forward passes took have their gradients, or else when it ends.
Under ``paused`` gradients add up instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstore import KVStore, Unsupported, UsageError
from kvstore.table import Table
from workers.common.row_steps import row_steps
from workers.common.torch_internals import after_backward, current_backward
from workers.embedding.bag_sums import bag_sums
from workers.embedding.fetches import Fetch, fetches_of
from workers.embedding.gradients import RowGradients, RowUse
from workers.embedding.id_order import sort_for
from workers.embedding.lookups import Lookup, TableIds, look_up_all

if TYPE_CHECKING:
    from typing_extensions import Self


class Ahead:
    """What one ``lookahead`` has asked for.

    Attributes:
        ready: by key the rows of the batch that is trained; none that lack a push.
        wanted: by key which rows the next push asks for, those of a later batch; empty for none.
        asked: by key the rows of the later batch, as the last push has asked for them.
    """

    def __init__(self) -> None:
        self.ready: dict[Any, Fetch] = {}
        self.wanted: dict[Any, Lookup] = {}
        self.asked: dict[Any, Fetch] = {}

    def begin(self, ready: dict[Any, Fetch], wanted: dict[Any, Lookup]) -> None:
        """Begin a batch."""
        self.ready, self.wanted, self.asked = ready, wanted, {}


class RowExchange:
    """Pushes and pulls rows for the modules that have their tables in ``store``.

    Args:
        store: the store.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._tables: dict[Any, Table] = {}
        self._rescale: float | None = None
        self._gradients = RowGradients()
        self._resting = self._pushed = False
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
        """Make a table in the store, whose gradients are multiplied by ``rescale_grad``; on all workers.

        Raises:
            UsageError: other modules of the store have another ``rescale_grad``.
            KVStoreError: an error of ``init``.
        """
        rescale = 1.0 / self.store.num_workers if rescale_grad is None else float(rescale_grad)
        if self._rescale not in (None, rescale):
            raise UsageError(
                f"rescale_grad={rescale} of {key!r}, but other tables of this store have {self._rescale}: they are "
                "pushed together; give all modules of a store the same"
            )
        self.store.init(key, table)
        self._rescale = rescale
        self._tables[key] = table

    # ---- rows

    def rows(self, wanted: TableIds) -> tuple[Lookup, torch.Tensor]:
        """Return which rows ``wanted`` needs, and these with a row of zeros below them.

        They are those that a ``lookahead`` has asked for, if it has; else they are pulled.

        Args:
            wanted: a tensor of ids, and their table.

        Raises:
            UsageError: these are no integers, or one of them is not in the table.
            KVStoreError: the rows did not come.
        """
        key = wanted.key
        fetch = self._ahead[-1].ready.get(key) if self._ahead else None
        if fetch is not None and fetch.lookup.matches(wanted.given):
            lookup = fetch.lookup
        else:
            (lookup,) = self.look_up([wanted])
        if fetch is None or not fetch.covers(lookup):
            fetch = self.pull({key: lookup})[key]
        return lookup, fetch.take(lookup)

    def look_up(self, wanted: Sequence[TableIds]) -> list[Lookup]:
        """Return which rows a batch needs; see ``look_up_all``."""
        return look_up_all(wanted, self._sort)

    def pull(self, lookups: Mapping[Any, Lookup]) -> dict[Any, Fetch]:
        """Ask for rows, in one message; return at once."""
        fetches = fetches_of(self._tables, lookups)
        if fetches:
            ids = [fetch.lookup.ids for fetch in fetches.values()]
            outs = [fetch.out for fetch in fetches.values()]
            ticket = self.store.row_sparse_pull(list(fetches), outs, row_ids=ids, wait=False)
            for fetch in fetches.values():
                fetch.ticket = ticket
        return fetches

    # ---- gradients

    def watch(self, key: Any, lookup: Lookup, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` as a leaf, whose gradient is pushed.

        Args:
            key: of the table.
            lookup: which rows they are, and the row of zeros.
            rows: on the device of the forward pass.
        """
        use = self._awaited(key, lookup)
        leaf = rows.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(self._arrive, use))  # type: ignore[no-untyped-call]
        return leaf

    def bag_sums(self, key: Any, lookup: Lookup, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows of each bag, whose gradient is pushed.

        Args:
            key: of the table.
            lookup: of bags that have the same number of ids, without padding.
            rows: see ``watch``; on the CPU.
        """
        use = self._awaited(key, lookup)
        return bag_sums(rows, lookup.inverse, partial(self._note, use, self._gradients.add_bags))

    def _awaited(self, key: Any, lookup: Lookup) -> RowUse:
        """Return a new use of rows, whose gradient is awaited as long as the use lives."""
        if current_backward() < 0:
            self._gradients.forget_unfinished()
        use = RowUse(key, lookup)
        self._gradients.awaited.add(use)
        return use

    def _arrive(self, use: RowUse, leaf: torch.Tensor) -> None:
        """Handle a gradient that backward has just accumulated."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            self._note(use, self._gradients.add, grad)

    def _note(self, use: RowUse, add: Callable[[RowUse, torch.Tensor], None], grad: torch.Tensor) -> None:
        """Note a gradient of ``use``; push if it is the last one."""
        with self._lock, torch.no_grad():
            if self._gradients.begin(current_backward()):
                after_backward(self._end)
            self._retained |= use not in self._gradients.awaited
            add(use, grad)
            if not (self._gradients.awaited or self._resting or self._retained):
                self._push()

    def _end(self) -> None:
        """Handle the end of a backward pass."""
        with self._lock, torch.no_grad():
            self._gradients.end()
            if self._gradients and not self._resting:
                self._push()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Push nothing in this block; gradients add up."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def flush(self) -> None:
        """Push the gradients that have added up, for all tables; with none, push no rows."""
        with self._lock, torch.no_grad():
            self._gradients.forget_unfinished()
            self._push()

    def step_over(self) -> None:
        """Handle the end of a step of the store's trainer: what has not been pushed in it is pushed now."""
        if self._gradients or not self._pushed:
            self.flush()
        self._pushed = False

    def _push(self) -> None:
        values = self._gradients.take(self._tables)
        self._steps.apply_rates()
        self.store.set_hyperparameters(rescale_grad=self._rescale)
        ahead = self._ahead[-1] if self._ahead else None
        keys = list(self._tables)
        self._pushed = True
        if ahead is None or not ahead.wanted:
            self.store.push(keys, values)
        else:
            fetches = fetches_of(self._tables, ahead.wanted)
            nothing = torch.empty(0, dtype=torch.int64, device="cpu")
            ids = [fetches[key].lookup.ids if key in fetches else nothing for key in keys]
            outs = [
                fetches[key].out if key in fetches else value.rows[:0] for key, value in zip(keys, values, strict=True)
            ]
            ticket = self.store.pushpull(keys, values, outs, wait=False, row_ids=ids)
            for fetch in fetches.values():
                fetch.ticket = ticket
            ahead.asked = fetches
        for each in self._ahead:
            each.ready = {}  # they are of the round before

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
        """Drop rows that have been asked for, since others have taken their place; they are pulled again."""
        for each in self._ahead:
            each.ready, each.asked = {}, {}

    def __deepcopy__(self, memo: Any) -> Self:
        """Copies of a module have the same table."""
        return self

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a module whose table is in a store cannot be pickled: save its state_dict(), which has the whole table, "
            "or the table itself with store.save_table"
        )
