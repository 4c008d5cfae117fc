"""``Embedding`` and ``EmbeddingBag``: torch's modules, with their rows in a store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from kvstore import FollowedTable, KVStore, OpenTable, Reader, RowSparse, UsageError
from kvstore.dynamo import outside_graphs
from kvstore.errors import choices
from kvstore.spec import Key
from kvstore.table import Admission, Eviction, Table
from kvstore.values import as_dtype
from workers.common.checks import at_least
from workers.embedding.exchange import RowExchange
from workers.embedding.lookups import Lookup, TableIds, ids_tensor
from workers.embedding.read_only import ReadOnlyTables, as_store

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

MODES = ("sum", "mean", "max")
FROZEN = "frozen"  # in the metadata of a ``state_dict``


CHUNK_BYTES = 8 << 20

_left_out: ContextVar[bool] = ContextVar("tables are left out", default=False)


@contextmanager
def tables_left_out() -> Iterator[None]:
    """Let ``state_dict`` leave out tables in this block: for names and shapes of the rest."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def table_state(store: KVStore, key: Any, table: Table, padding: int | None) -> dict[str, torch.Tensor]:
    """Return a table as tensors by name: ``weight``; of one that grows ``ids``, rising, and ``rows``.

    The padding's row is zeros. Within ``tables_left_out`` there are none.
    """
    if _left_out.get():
        return {}
    if table.rows is None:
        parts = list(store.table_rows(key))
        nothing = RowSparse.zeros((0, *table.row), table.dtype)
        ids = torch.cat([part.ids for part in parts] or [nothing.ids])
        rows = torch.cat([part.rows for part in parts] or [nothing.rows])
        order = torch.argsort(ids)
        return {"ids": ids[order], "rows": rows[order]}
    weight = torch.empty((table.rows, *table.row), dtype=as_dtype(table.dtype), device="cpu")
    for chunk in _chunks(table, table.rows):
        ids = torch.arange(chunk.start, chunk.stop, dtype=torch.int64, device="cpu")
        store.row_sparse_pull(key, weight[chunk.start : chunk.stop], row_ids=ids)
    if padding is not None:
        weight[padding] = 0
    return {"weight": weight}


def load_table(
    store: KVStore, key: Any, table: Table, padding: int | None, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Give a table rank 0's rows. Every worker calls this, and returns when they are there.

    Rows that the table has already are left alone. ``put_rows`` would take their states, and what a codec or half
    precision has rounded off: a program that attaches its model would resume from a checkpoint with other bits.

    Returns the names that are missing in ``state``, and the unknown ones. If any is missing, nothing is loaded.
    """
    expected = ["ids", "rows"] if table.rows is None else ["weight"]
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing:
        return missing, unexpected
    given = state["rows" if table.rows is None else "weight"].detach()
    ids = state["ids"] if table.rows is None else None
    count = len(ids) if ids is not None else table.rows
    if tuple(given.shape) != (count, *table.row):
        raise UsageError(f"its rows have the shape {tuple(given.shape)}, but should have {(count, *table.row)}")
    if padding is not None and ids is None and bool(given[padding].any()):
        raise UsageError(f"row {padding} is that of the padding, which is zeros here, but not in what is loaded")
    if store.rank == 0:
        given = given.to(as_dtype(table.dtype)).cpu()
        numbers = torch.arange(len(given), dtype=torch.int64, device="cpu") if ids is None else ids.cpu()
        others = _differ(numbers, given, table_state(store, key, table, padding))
        for chunk in _chunks(table, len(others)):
            part = others[chunk.start : chunk.stop]
            store.put_rows(key, RowSparse(numbers[part], given[part]))
    store.barrier()
    return [], unexpected


def _differ(ids: torch.Tensor, rows: torch.Tensor, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the positions of ``rows`` that a table with the state ``held`` has not got."""
    if "weight" in held:
        return (rows != held["weight"]).flatten(1).any(1).nonzero()[:, 0]
    if not len(held["ids"]):
        return torch.arange(len(ids), dtype=torch.int64, device="cpu")
    at = torch.searchsorted(held["ids"], ids).clamp(max=len(held["ids"]) - 1)
    return ((held["ids"][at] != ids) | (rows != held["rows"][at]).flatten(1).any(1)).nonzero()[:, 0]


def _chunks(table: Table, count: int) -> Iterator[range]:
    size = max(1, CHUNK_BYTES // table.row_bytes)
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


class TableModule(nn.Module):
    """What ``Embedding`` and ``EmbeddingBag`` have in common."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        store: KVStore | Reader | Mapping[Key, OpenTable | FollowedTable],
        key: Key,
        padding_idx: int | None = None,
        init: str = "normal",
        scale: float = 1.0,
        seed: int = 0,
        dtype: Any = "float32",
        admit: Admission | None = None,
        evict: Eviction | Iterable[Eviction] = (),
        codec: str | None = None,
        rescale_grad: float | None = None,
    ) -> None:
        super().__init__()
        store = as_store(store)
        dim = at_least("embedding_dim", embedding_dim, 1)
        shape = None if num_embeddings is None else (at_least("num_embeddings", num_embeddings, 1), dim)
        if padding_idx is not None and num_embeddings is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError(f"padding_idx={padding_idx} must be within the {num_embeddings} embeddings")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, dim, padding_idx
        self.key = key
        self.table = Table(
            shape, None if shape else dim, dtype, init, scale, seed, admit=admit, evict=evict, codec=codec
        )
        exchange = RowExchange.of(store)
        exchange.add(key, self.table, rescale_grad)
        self._begin(exchange)

    def _begin(self, exchange: RowExchange) -> None:
        # The table as parameters() shows it: it has no rows, but says whether they are trained.
        trained = not isinstance(exchange.store, ReadOnlyTables)
        self.weight = nn.Parameter(torch.empty((0, self.embedding_dim), dtype=torch.float32, device="cpu"), trained)
        self.exchange = exchange
        exchange.use(self.key, self)

    def _share(self, other: TableModule) -> Self:
        """Begin as another module over the table of ``other``."""
        if not isinstance(other, TableModule):
            raise UsageError(
                f"{type(self).__name__}.of takes a workers.Embedding or a workers.EmbeddingBag, not a "
                f"{type(other).__name__}"
            )
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = other.num_embeddings, other.embedding_dim
        self.key, self.table, self.padding_idx = other.key, other.table, other.padding_idx
        self._begin(other.exchange)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.exchange.use(self.key, self)

    @property
    def store(self) -> KVStore:
        """The store that has the table; of a module that only reads, what stands for one."""
        return self.exchange.store

    def no_sync(self) -> AbstractContextManager[None]:
        """Push nothing during backward passes in this block; gradients add up, and go with the next push.

        It holds for all modules of the store.
        """
        return self.exchange.paused()

    def flush(self) -> None:
        """Push the gradients that have added up, of all modules of the store; no rows, if there are none.

        Only needed where no backward pass follows that pushes: after ``no_sync`` at the end of an epoch, or in a step
        of the other workers in which this worker's loss depends on no table.
        """
        self.exchange.flush()

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        rows = "grows" if self.num_embeddings is None else str(self.num_embeddings)
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{rows}, {self.embedding_dim}, key={self.key!r}{padding}"

    def table_ids(self, ids: Any) -> TableIds:
        """Return what ``ids`` ask of the table."""
        return TableIds(self.key, self.table, ids_tensor(self.key, ids), self.padding_idx)

    def _rows(self, given: Any) -> tuple[Lookup, torch.Tensor]:
        """Return the lookup of ``given``, and its rows."""
        lookup, rows = self.exchange.rows(self.table_ids(given))
        return lookup, rows.to(lookup.given.device)

    @property
    def frozen(self) -> bool:
        """Whether this module does not train its table."""
        weight = self._parameters["weight"]  # an attribute takes ten times as long, and each step asks for it often
        return weight is None or not weight.requires_grad

    @property
    def trains(self) -> bool:
        """Whether a forward pass now would have its gradients pushed."""
        return self.training and torch.is_grad_enabled() and not self.frozen

    @outside_graphs
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The parameter without rows is in the way of the table's own ``weight``.
        del destination[prefix + "weight"]
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and self.frozen:
            metadata[FROZEN] = True
        # A reader's tables are no part of the model, and the servers have what a worker that comes back needs.
        if isinstance(self.store, ReadOnlyTables) or self.store.handing_over:
            return
        for name, tensor in table_state(self.store, self.key, self.table, self.padding_idx).items():
            if prefix + name in destination:
                raise UsageError(
                    f"state_dict: {prefix + name!r} would be a buffer or parameter of this module, and the {name} of "
                    f"its table {self.key!r}; give the buffer or parameter another name"
                )
            destination[prefix + name] = tensor

    @outside_graphs
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if isinstance(self.store, ReadOnlyTables):
            return
        if self.store.handing_over:
            self.exchange.forget()
            return
        mine = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        try:
            missing, unexpected = load_table(self.store, self.key, self.table, self.padding_idx, mine)
        except UsageError as exc:
            error_msgs.append(f"table {self.key!r} at {prefix.rstrip('.') or 'the top'}: {exc}")
            return
        self.exchange.forget()
        if local_metadata.get(FROZEN) and not self.frozen:
            self.weight.requires_grad_(False)
            log.warning(
                "table %r was frozen when this state was saved, and is frozen from now on; requires_grad_() of the "
                "module trains it",
                self.key,
            )
        if strict:
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"mode={mode!r} must be one of {choices(MODES)}")
    return mode


class Embedding(TableModule):
    """``torch.nn.Embedding`` whose rows are a table in a store: a batch pulls those that it needs, and no others.

        store = kv.create("dist_sync")
        store.set_optimizer("adagrad", learning_rate=0.05)
        items = workers.Embedding(10**6, 64, store=store, key="item", scale=0.05)
        users = workers.Embedding(None, 16, store=store, key="user", scale=0.01)  # it grows: ids are any 64-bit numbers
        loss = loss_function(model(items(item_ids), users(user_ids)), labels)
        loss.backward()  # pushes the gradients of the rows

    The store's optimizer updates the rows, with the gradients' sum over workers times a factor; see ``rescale_grad``.
    Each backward pass that reaches a module pushes once, for all modules of the store together, perhaps no rows: so all
    workers make as many backward passes. Under ``no_sync`` gradients add up instead. (``torch.utils.checkpoint`` makes
    several backward passes of one, unless ``use_reentrant=False``.)

    Where a ``Trainer`` has the same store, its ``step`` pushes instead, once for all backward passes of the step, with
    the rates and the batch size of the step; its ``zero_grad``, ``no_sync`` and ``join`` are for the tables, too. Make
    one store for both, or none of the trainer's settings reaches the rows. With two stores, ``workers.join`` ends an
    epoch in which some workers have more batches. Gradients of rows are neither clipped by norm nor unscaled by a
    ``GradScaler``.

    In evaluation mode, and under ``torch.no_grad``, rows are only pulled, and none is made. So are those of a module
    that is frozen, in any of torch's ways: ``requires_grad_(False)`` of the module or of a model with it, or of
    ``weight``, the parameter that stands for the table and has no elements. A frozen table is not pushed to. All
    workers freeze the same tables; others get a ``Mismatch``. Copies of a module share its table, which is trained as
    long as one of them is not frozen.

    ``state_dict`` has the whole table: ``weight``, or of a table that grows ``ids`` and ``rows``. Its metadata say
    whether the module is frozen, and a module that loads this is, too; files of safetensors have no such metadata. All
    workers call ``load_state_dict``, and rank 0's rows count. The optimizer's states of rows begin anew where a row
    changes.

    Args:
        num_embeddings: the number of rows; None for a table that grows.
        embedding_dim: the length of a row.
        store: has the table, and an optimizer when the first gradient comes. Several modules may share it. To read rows
            only, in a model that is written once for training and serving: a reader (``kv.connect``), which pulls them,
            or open tables by key, ``{"item": kv.open_table(directory)}``. The module is frozen then, and its table is
            neither in ``state_dict`` nor loaded.
        key: the table's key in the store, which no other value has; ``of`` makes another module of the same table.
        padding_idx: an id that gives zeros; it has no row.
        init: how a row begins; see ``kvstore.Table``, also for what follows.
        scale: of the initial values.
        seed: of the initial values.
        dtype: of the rows.
        admit: which ids get rows, in a table that grows.
        evict: which rows go, and when, in a table that grows.
        codec: how rows and gradients travel.
        rescale_grad: the factor of gradients, whatever the optimizer's or a trainer's step is; the same for all modules
            of the store. None takes the factor of the trainer's step, which has the batch size if ``step`` is given
            one; without a trainer it takes the store's ``rescale_grad`` divided by the number of workers, for a loss
            that is a mean over this worker's batch.

    Raises:
        UsageError: an argument is invalid, or contradicts another module of the store.
        AlreadyInitialized: the store has a value under this key.
    """

    @classmethod
    def of(cls, module: Embedding | EmbeddingBag) -> Self:
        """Return another module over the table of ``module``; see ``EmbeddingBag.of``."""
        return cls.__new__(cls)._share(module)

    def forward(self, input: Any) -> torch.Tensor:
        """Return the embeddings of ``input``, integers of any shape; of shape ``(*input.shape, embedding_dim)``.

        Raises:
            UsageError: these are no integers, or one of them is not in the table.
            KVStoreError: the rows did not come.
        """
        lookup, rows = self._rows(input)
        if self.trains:
            rows = self.exchange.watch(self.key, lookup, rows, self.weight)
        padding = len(lookup.ids) if lookup.padded else None
        return functional.embedding(lookup.inverse, rows, padding, sparse=True)


class EmbeddingBag(TableModule):
    """``torch.nn.EmbeddingBag`` whose rows are a table in a store; for all else see ``Embedding``.

    Args:
        num_embeddings: the number of rows; None for a table that grows.
        embedding_dim: the length of a row.
        store: see ``Embedding``.
        key: the table's key in the store.
        mode: what becomes of the rows of a bag: their ``sum``, their ``mean``, or of each column the maximum, ``max``.
        include_last_offset: ``offsets`` has one more element, the number of ids.
        padding_idx: an id that counts as if it were not in the bag.
        table: ``init``, ``scale``, ``seed``, ``dtype``, ``admit``, ``evict``, ``codec``, and ``rescale_grad``; see
            ``Embedding``.

    Raises:
        UsageError: an argument is invalid, or contradicts another module of the store.
        AlreadyInitialized: the store has a value under this key.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        store: KVStore | Reader | Mapping[Key, OpenTable | FollowedTable],
        key: Key,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **table: Any,
    ) -> None:
        _known_mode(mode)
        super().__init__(num_embeddings, embedding_dim, store=store, key=key, padding_idx=padding_idx, **table)
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    def of(cls, module: Embedding | EmbeddingBag, mode: str = "mean", include_last_offset: bool = False) -> Self:
        """Return another module over the table of ``module``, in the same store.

            items = workers.Embedding(10**6, 64, store=store, key="item")
            history = workers.EmbeddingBag.of(items, mode="mean")  # the same rows, pooled

        A push has the sum of the gradients of both. Each has the whole table in its ``state_dict``, as torch's modules
        with one weight do.

        Args:
            module: whose table, ``padding_idx`` and ``rescale_grad`` the new module has, too.
            mode: see the class, as for ``include_last_offset``.
            include_last_offset: see the class.

        Raises:
            UsageError: ``module`` has no table in a store, or there is no such mode.
        """
        made = cls.__new__(cls)._share(module)
        made.mode, made.include_last_offset = _known_mode(mode), include_last_offset
        return made

    def forward(
        self, input: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what the bags of ids come to, of shape ``(bags, embedding_dim)``.

        Args:
            input: ids: of shape (bags, ids of each), or one bag after the other.
            offsets: where in a flat ``input`` each bag begins.
            per_sample_weights: a factor for each id, with ``mode="sum"``; of the shape of ``input``.

        Raises:
            UsageError: these are no integers, or one of them is not in the table.
            KVStoreError: the rows did not come.
        """
        input = ids_tensor(self.key, input)
        if input.dim() not in (1, 2) or (input.dim() == 1) == (offsets is None):
            given = f"ids of shape {tuple(input.shape)} and {'no ' if offsets is None else ''}offsets"
            raise UsageError(
                f"the EmbeddingBag of {self.key!r} was given {given}: pass ids of shape (bags, ids of each), or all "
                "ids one after the other, in one dimension, and offsets=, a tensor of where each bag begins"
            )
        lookup, rows = self._rows(input)
        if self.trains:
            bags = lookup.inverse.dim() == 2 and offsets is None and per_sample_weights is None and not lookup.padded
            if bags and self.mode == "sum" and rows.is_cpu:
                return self.exchange.bag_sums(self.key, lookup, rows, self.weight)
            rows = self.exchange.watch(self.key, lookup, rows, self.weight)
        return functional.embedding_bag(
            lookup.inverse,
            rows,
            offsets,
            mode=self.mode,
            sparse=self.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=len(lookup.ids) if lookup.padded else None,
        )

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
