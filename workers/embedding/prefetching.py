"""``lookahead``: the rows of the next batch are asked for while this batch is trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, TypeAlias

import torch

from kvstore import UsageError
from kvstore.dynamo import outside_graphs
from workers.common.checks import at_least
from workers.common.read_ahead import reading_into
from workers.embedding.exchange import RowExchange
from workers.embedding.lookups import Fetch, Lookup, TableIds
from workers.embedding.modules import TableModule

IdsOfBatch: TypeAlias = Callable[[Any], Any]
Rows: TypeAlias = "dict[Any, Fetch]"  # by key

_END = object()


def lookahead(loader: Iterable[Any], ids_of_batch: Mapping[Any, Callable[[Any], Any]], *, stale: int = 0) -> Lookahead:
    """Iterate over the batches of ``loader``, and have the rows of each there when its forward pass needs them.

        for batch in workers.lookahead(loader, {items: lambda batch: batch.item, users: lambda batch: batch.user}):
            loss_of(batch).backward()  # pushes gradients, and asks for the rows of the next batch
            trainer.step()

    The push of a batch asks for the next batch's rows, of all modules in one message. Servers answer it when that push
    has taken effect, so rows are those that a pull would give; the wait for them is hidden behind the rest of the step.
    In evaluation, and of frozen modules, rows are asked for one batch ahead. Rows that a forward pass needs beside them
    are pulled. So are those of a table that has changed otherwise since they were asked for: by ``load_table``,
    ``load_state_dict``, ``put_rows``, ``evict`` or a push of the program's own, and by other workers' calls of these
    before a ``barrier``.

    Args:
        loader: an iterable of batches, such as a ``DataLoader``; it may be iterated again for each epoch. One batch is
            read ahead, and ``stale`` more.
        ids_of_batch: for each module a function from a batch to the ids that its forward pass will be given.
        stale: how many pushes before that of the batch before a batch's rows are asked for. They then lack so many
            updates, and the wait is hidden behind as many whole steps.

    Returns:
        An iterable. It has the length and the attributes of ``loader``.

    Raises:
        UsageError: a module has no table in a store, or an argument is invalid.
    """
    for module in ids_of_batch:
        if not isinstance(module, TableModule):
            raise UsageError(
                f"lookahead is for workers.Embedding and workers.EmbeddingBag, not for a {type(module).__name__}"
            )
    return Lookahead(loader, ids_of_batch, at_least("stale", stale, 0))


@outside_graphs
class Lookahead:
    """The batches of a loader, with their rows."""

    def __init__(self, loader: Iterable[Any], ids_of_batch: Mapping[TableModule, IdsOfBatch], stale: int) -> None:
        self.loader = loader
        self._ids_of_batch = dict(ids_of_batch)
        self._stale = stale

    def over(self, loader: Iterable[Any]) -> Lookahead:
        return Lookahead(loader, self._ids_of_batch, self._stale)

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[Any] = deque()  # what samplers do not count as used
        batches = _noted(iter(self.loader), waiting)
        modules: dict[RowExchange, list[TableModule]] = {}
        for module in self._ids_of_batch:
            modules.setdefault(module.exchange, []).append(module)
        coming: deque[tuple[Any, list[Rows]]] = deque()
        for batch in islice(batches, self._stale + 1):
            coming.append((batch, [each.pull(self._lookups(each, modules[each], batch)) for each in modules]))
        with ExitStack() as stack:
            aheads = [stack.enter_context(exchange.looking_ahead()) for exchange in modules]
            while coming:
                batch, rows = coming.popleft()
                later = next(batches, _END)
                for exchange, ahead, ready in zip(modules, aheads, rows, strict=True):
                    wanted = {} if later is _END else self._lookups(exchange, modules[exchange], later)
                    ahead.begin(ready, wanted)
                    if not any(module.trains for module in modules[exchange]):  # no push will ask for them
                        ahead.asked = exchange.pull(wanted)
                waiting.popleft()
                yield batch
                if later is not _END:
                    for exchange, ahead in zip(modules, aheads, strict=True):
                        if not ahead.asked:  # nothing has been pushed
                            ahead.asked = exchange.pull(ahead.wanted)
                    coming.append((later, [ahead.asked for ahead in aheads]))

    def _lookups(self, exchange: RowExchange, modules: list[TableModule], batch: Any) -> dict[Any, Lookup]:
        by_key: dict[Any, list[TableIds]] = {}
        for module in modules:
            by_key.setdefault(module.key, []).append(module.table_ids(self._ids_of_batch[module](batch)))
        wanted = [_joined(each) for each in by_key.values()]
        return {each.key: lookup for each, lookup in zip(wanted, exchange.look_up(wanted), strict=True)}

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def _joined(asked: list[TableIds]) -> TableIds:
    """Return what the modules over one table ask for together; each takes its own of these rows."""
    if len(asked) == 1:
        return asked[0]
    return asked[0]._replace(given=torch.cat([each.given.reshape(-1).cpu() for each in asked]))


def _noted(batches: Iterator[Any], waiting: deque[Any]) -> Iterator[Any]:
    while True:
        with reading_into(waiting):
            batch = next(batches, _END)
        if batch is _END:
            return
        waiting.append(batch)
        yield batch
