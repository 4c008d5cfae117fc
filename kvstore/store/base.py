"""KVStore, the interface. Imports torch only when a store is made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvstore.dynamo import outside_graphs
from kvstore.errors import UnknownName, Unsupported, UsageError
from kvstore.shares import Share, Shares
from kvstore.spec import Key, as_shape, shorten
from kvstore.store.arguments import RowRequests, group, one_kind, requests_of
from kvstore.store.registry import register
from kvstore.store.statistics import Statistics
from kvstore.ticket import Ticket, claim, finish

if TYPE_CHECKING:
    from kvstore.rows.row_sparse import RowSparse

T = TypeVar("T", bound="type[KVStore]")


class TableChanges(NamedTuple):
    """What one worker knows of the changes of a table. Rows that were pulled before it differs may be old."""

    # how often this worker has pushed to the table or changed it otherwise, and how many barriers it has passed, for
    # another worker may have changed the table before one
    changes: int
    # how often ``load_table`` has been called: what was computed from rows before it belongs to rows that are no longer
    # there
    loads: int


class ReservedJoin(NamedTuple):
    """The calls of a store whose ``join`` is reserved."""

    begin: Callable[[], None]  # see ``KVStore.begin_join``
    join: Callable[[float | None], int]  # see ``KVStore.join``


@outside_graphs
class KVStore:
    """Arrays by key: pushed values are summed, and assigned or handed to an optimizer; pulled ones are the result.

    A key is an ``int`` from ``-2**63`` to ``2**64 - 1`` or a ``str``; one store has keys of one kind. A value is a
    numpy array, a torch tensor on any device, a cupy array or anything with DLPack; a list of them holds one per
    device, whose sum counts. Numpy arrays of foreign byte order are converted; nothing can be written into them. Every
    method that takes a key also takes a list of keys, with a list of values.

    A key may also have a table, whose rows are pushed and pulled by their ids; see ``Table`` and ``RowSparse``. Lists
    of keys may have tables and arrays.

    ``create`` makes one. To add a store, subclass and register it (as MXNet's ``KVStoreBase.register``):

        @kv.KVStore.register
        class Mine(kv.KVStore):
            def pushpull(self, key, value, out=None, priority=0, *, wait=True, copy=True): ...

        kv.create("mine")

    Args:
        name: what ``type`` is; the name of the class, in lower case, if it is empty.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Give methods without a docstring ``KVStore``'s, so that ``help`` and editors show it for every store."""
        super().__init_subclass__(**options)
        outside_graphs(cls)
        for name, member in vars(cls).items():
            if isinstance(member, FunctionType | property) and not member.__doc__:
                member.__doc__ = getattr(getattr(KVStore, name, None), "__doc__", None)

    _on_pull: Callable[[Any], None] | None = None
    _warned_left_out = False

    def __init__(self, name: str = "") -> None:
        self._name = name or type(self).__name__.lower()
        self._kind: type | None = None
        self._shares = Shares()

    # ---- arrays

    def init(self, key: Any, value: Any) -> None:
        """Give new keys their first values; on all workers, once for each key.

        Rank 0's values are the ones that count. On the others this returns when they are there.

        Args:
            key: one new key or a list of them.
            value: for each key, an array. Its shape and dtype are the key's from now on. Of a list, the first counts.
                Or a ``Table``, which stores make themselves, row by row: no worker need hold it. Or a ``RowSparse``
                with a shape, or a ``torch.sparse_coo`` tensor: a table of that shape, of zeros beside these rows.

        Raises:
            AlreadyInitialized: a key was initialized before; nothing has changed.
            Mismatch: another worker initialized a key with another shape or dtype.
            DeadlineExceeded: rank 0 has not called ``init`` for these keys in time.
        """
        pairs = self._pairs(key, value)
        self._init(pairs, list(key) if isinstance(key, list | tuple) else [key])
        self._kind = one_kind(pairs, self._kind)

    def push(self, key: Any, value: Any, priority: int = 0, *, wait: bool = False) -> Ticket:
        """Contribute values: their sum over devices and workers is assigned, or handed to the optimizer if one is set.

        Args:
            key: one key or a list of them.
            value: for each key, a value or a list of them (one per device). For a table each is a ``RowSparse`` or a
                ``torch.sparse_coo`` tensor: rows of one id are summed, and rows that no worker pushes stay as they are.
                So may be those of an array: an optimizer with a rule for rows updates these alone, and otherwise all
                others have zeros.
            priority: higher ones are served first where there is a choice.
            wait: return when the push has taken effect; if False, at once, when the values have been copied.

        Returns:
            A ticket that is done when the push has taken effect.

        Raises:
            KeyNotInitialized: this worker has not passed a key to ``init``.
            Mismatch: a value has another shape or dtype than its key.
            NotFinite: the store checks, and some elements are NaN or infinite. In dist stores the ticket raises it, on
                every worker of the round; other segments of the same push may have been updated. Rows of a table with
                NaN are refused in any store, by the call itself, and nothing is sent.
        """
        return finish(self._push(self._pairs(key, value), priority), wait)

    def pull(
        self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        """Write current values into ``out``: with ``dist_sync``, those that include every push of this worker so far.

        Args:
            key: one key or a list of them.
            out: for each key, an array of its shape and dtype, or a list of them, to write into.
            priority: higher ones are served first where there is a choice.
            ignore_sparse: leave tables out, with one warning, as MXNet does. If False, ``out`` of a table with a shape
                is an array of that shape, or a ``RowSparse``, and gets all its rows.
            wait: return when ``out`` is written. If False, return at once; the ticket's ``wait`` writes ``out``. If the
                same key is pushed again before that, the value may be that of the later round.
            copy: False lets each ``out`` *become* the value, if that needs no copy: in dist stores, where ``out`` is a
                contiguous torch tensor on the CPU and its key is not cut across servers. Its old memory is let go, and
                its ``data`` is memory that the server and other workers may be reading. Do not write into it: that
                would change the value for all. It stays as it is when the server goes on; the next pull gives another
                one.

        Raises:
            KeyNotInitialized: this worker has not passed a key to ``init``.
            Mismatch: an ``out`` has another shape or dtype than its key.
            DeadlineExceeded: the value did not come in time; the message names who is missing.
        """
        outs = self._pairs(key, out)
        if ignore_sparse:
            outs = self._arrays_of(outs)
        if self._on_pull is not None:
            self._on_pull(out)
        return finish(self._pull(outs, priority, copy), wait)

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any = None,
        priority: int = 0,
        *,
        wait: bool = True,
        copy: bool = True,
        row_ids: Any = None,
    ) -> Ticket:
        """``push`` and ``pull`` in one message; without an optimizer, an all-reduce.

        Args:
            key: one key or a list of them.
            value: as for ``push``.
            out: as for ``pull``, and for tables as for ``row_sparse_pull``; None writes into ``value``. Without ``out``
                and with ``row_ids``, the ticket's ``wait`` returns the rows.
            priority: higher ones are served first where there is a choice.
            wait: as for ``pull``.
            copy: as for ``pull``.
            row_ids: for tables, which rows come back: as for ``row_sparse_pull``, by default those that are pushed; or
                ``"round"``, where ``out`` is a ``RowSparse`` and each round waits for all workers: those that any of
                them has pushed. In a list of keys, None for each that has an array.

        Returns:
            A ticket that is done when ``out`` is written.

        Raises:
            KeyNotInitialized: this worker has not passed a key to ``init``.
            Mismatch: a value or an ``out`` has another shape or dtype than its key.
            NotFinite: as for ``push``.
            DeadlineExceeded: as for ``pull``.
        """
        values = self._pairs(key, value)
        if row_ids is not None:
            requests = requests_of(key, out, row_ids)
            ticket = self._pushpull_rows(values, requests, priority, copy)
            claim(ticket).result = requests.result()
            return finish(ticket, wait)
        outs = values if out is None else self._pairs(key, out)
        return finish(self._pushpull(values, outs, priority, copy), wait)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """``init`` with ``value``, then ``pull`` into ``out``: every worker gets rank 0's values.

        Args:
            key: one new key or a list of them.
            value: as for ``init``.
            out: as for ``pull``.
            priority: as for ``pull``.
        """
        self.init(key, value)
        self.pull(key, out, priority)

    def empty(self, shape: Any, dtype: Any = None) -> Any:
        """Return a new, uninitialized torch tensor on the CPU that is pushed without a copy where that is possible.

        In dist stores it lies in memory that the servers of this host can read; elsewhere it is an ordinary tensor. It
        must not change from its push until the push has taken effect: until ``pushpull`` returns, or the ticket is
        done. Views of it count as the tensor itself.

        Args:
            shape: a number or a tuple of them.
            dtype: as torch, numpy or a name has it; float32 by default.
        """
        import torch

        from kvstore.values import as_dtype

        return torch.empty(as_shape(shape), dtype=as_dtype(dtype), device="cpu")

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        """Compress what is pushed from now on; on all workers alike, before a push or between two.

        What an encoding lacks is kept and goes with the next push of the key. Integers are sent as they are. A store in
        one process sends nothing: there each device's value is encoded, with a residual of its own, and decoded.

        Args:
            compression: a dict with ``type``, the parameters of that type, and perhaps ``pull``: a type, or such a
                dict, for what comes back. None, or the type ``none``, turns compression off.

        The types, and their parameters; ``docs/compression.md`` says what each does, and which to choose:

        - ``fp16``, ``bf16``
        - ``int8``: ``stochastic``
        - ``2bit``, ``1bit``: ``threshold``
        - ``topk``: ``ratio`` or ``k``, ``momentum``, ``warmup_steps``
        - ``threshold``: ``threshold``, ``momentum``
        - ``randomk``: ``ratio`` or ``k``, ``seed``
        - ``powersgd``: ``rank``

        Raises:
            UnknownName: no such type or parameter; the message lists those there are.
            UsageError: a parameter out of range.
            Unsupported: ``pull`` is given for a store in one process.
        """
        raise self._unsupported("set_gradient_compression")

    def watch_pulls(self, on_pull: Callable[[Any], None]) -> None:
        """Have ``on_pull`` called with each ``out`` that the program passes to ``pull``, before it is written.

        For what must tell the store's own values from others that the program writes to the same arrays.
        """
        self._on_pull = on_pull

    def declare(self, text: str | None) -> None:
        """Send ``text`` with this worker's pushes from now on. A round fails if its workers send different texts.

            store.declare("fc.weight frozen")  # a Mismatch on all, unless each worker says so

        A program declares what all workers must do alike, and what the servers cannot see. Stores in which a push is an
        update of its own, or may count in a later round, compare nothing.

        Args:
            text: what the servers compare; None for nothing.
        """

    # ---- tables: rows by their ids

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, *, wait: bool = True
    ) -> Any:
        """Pull rows of tables by their ids; with ``dist_sync``, rows that include every push of this worker so far.

        No row is made by this: what no push has made yet has the value that it would begin with, and in a table with an
        admission rule zeros.

        Args:
            key: one key of a table, or a list of them.
            out: for each key what to write into, or a list of these: an array of shape ``(*row_ids.shape, *row)``, or
                a ``RowSparse``, which becomes the ids, each once and rising, and their rows. None: see below.
            priority: higher ones are served first where there is a choice.
            row_ids: for each key the ids of rows: an array of integers or a list of them, of any shape and order, with
                duplicates. If ``out`` is a list, one such array is for all of it, or a list has one for each.
            wait: return when the rows are there. If False, return a ticket at once.

        Returns:
            Without ``out``, a tensor of shape ``(*row_ids.shape, *row)``, for a list of keys a list of them. With
            ``out`` or without ``wait`` a ticket, whose ``wait`` returns that.

        Raises:
            KeyNotInitialized: this worker has not passed a key to ``init``.
            Mismatch: an ``out`` has another shape or dtype than the rows; or the key is of an array, not of a table.
            UsageError: there is no ``row_ids``, or an id that cannot be in the table; the message says which.
            DeadlineExceeded: the rows did not come in time; the message names who is missing.
        """
        requests = requests_of(key, out, row_ids)
        ticket = self._pull_rows(requests, priority)
        claim(ticket).result = requests.result()
        result = ticket.wait() if wait else None
        return result if wait and out is None else ticket

    def put_rows(self, key: Any, value: Any) -> None:
        """Replace rows of a table by these, between pushes; rank 0's are the ones that count.

        The optimizer's states of these rows begin anew. Whoever pulls afterwards gets the new rows; a worker that must
        not pull earlier waits at a ``barrier``.

        Args:
            key: of one table.
            value: a ``RowSparse`` or a ``torch.sparse_coo`` tensor, with each id once.

        Raises:
            Mismatch: the rows are not those of the table; or the key is of an array.
            UsageError: an id cannot be in the table, or comes twice.
        """
        raise self._unsupported("put_rows")

    def table_rows(self, key: Any) -> Iterator[RowSparse]:
        """Yield all rows of a table as it is at this call, after all pushes so far, some thousands at a time.

        Of a table with a shape these are rows that a push or ``put_rows`` has changed, and perhaps others: what is not
        there is as the table's ``init`` says.

        Args:
            key: of one table.
        """
        raise self._unsupported("table_rows")

    def evict(self, key: Any) -> None:
        """Let rows of growing tables go now that their rules say may go, after all pushes so far; on all workers.

        Args:
            key: one key of a table, or a list of them.

        Raises:
            KeyNotInitialized: this worker has not passed a key to ``init``.
            Mismatch: the key is of an array, not of a table.
        """
        raise self._unsupported("evict")

    def table_statistics(self, key: Any) -> dict[str, int]:
        """Return what a table has in it and has done, on all servers together.

        Args:
            key: of one table.

        Returns:
            Numbers by name: ``rows`` that are there, that were ``made`` and ``evicted`` so far; how often a gradient
            was ``refused``, since its id was not admitted; ``bytes`` of memory; and the ``version``, how many updates
            the table has had.
        """
        raise self._unsupported("table_statistics")

    def table_changes(self, key: Any) -> TableChanges:
        """Return a mark of what this worker has done to a table so far; asks nobody.

        Args:
            key: of one table.
        """
        raise self._unsupported("table_changes")

    def save_table(
        self,
        key: Any,
        dir: str | os.PathLike[str],
        state: bool = True,
        since: int | None = None,
        *,
        wait: bool = True,
    ) -> Ticket:
        """Write a table as it is now into a directory, while training goes on; one worker's call suffices.

        ``load_table`` reads it, with any number of servers, and ``open_table`` without any. A directory takes any
        number of saves of one table, and of no other, each in a folder of its own, which counts from the moment when
        its manifest is there.

        Args:
            key: of one table.
            dir: the directory, made if it is missing.
            state: save the optimizer's state of each row, too.
            since: the version of a save in ``dir``: save only what has changed since. None saves all. So does a version
                that the table does not continue, or of which it is not known what has changed since; a warning is
                logged then. Versions are set back by ``load_table`` and by jobs that resume, and do not count rows that
                were put or states that were dropped: such a save is never mixed with what has changed since.
            wait: return when it is written. If False, return when the servers have noted what is to be saved. It is
                then written in a twentieth of the time, so that training hardly slows down, until the ticket is waited
                for.

        Returns:
            A ticket, whose ``wait`` returns the version that was saved: what a later ``since`` may be.

        Raises:
            UsageError: the directory cannot be written to, has no save of that version, or has one that was written by
                another number of servers. The message says which; a save of the whole table helps.
        """
        raise self._unsupported("save_table")

    def load_table(self, key: Any, dir: str | os.PathLike[str]) -> None:
        """Take the rows of a table from a directory, and their states, if it has states of the store's optimizer.

        Every worker may call it; rank 0's directory is the one that counts. Rows that were not saved stay as they are.
        What an admission rule has counted of ids without rows is not saved. Gradients of ``workers.Embedding`` that
        came of rows before this call, on a worker that makes it, are dropped with a warning.
        The files are compared with their sha256.

        Args:
            key: of one table, which ``init`` has been given; its rows are as wide as those that were saved.
            dir: where ``save_table`` has written, with any number of workers and servers.

        Raises:
            UsageError: the directory has no whole table, is damaged, or has another table.
        """
        raise self._unsupported("load_table")

    # ---- updates

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """Update with this optimizer from now on, instead of assigning.

        Every worker may call it, with the same arguments, or rank 0 alone; it acts once. Called again with other
        numbers it keeps the optimizer's state; another optimizer drops it, with a warning.

        Args:
            optimizer: the name of one of torch's or MXNet's (``sgd``, ``nag``, ``adam``, ``adamw``, ``lamb``, ...;
                ``docs/from-mxnet.md`` lists them), its class, or an instance that has not been used, whose defaults are
                taken.
            hyperparameters: the optimizer's, by torch's names (``lr``, ``weight_decay``, ...) or MXNet's
                (``learning_rate``, ``wd``, ...), and those below.

        Every optimizer has these, too:

        - ``rescale_grad`` (1): gradients are multiplied by it first.
        - ``clip_gradient`` (None): then each of their elements is clipped to plus and minus this.
        - ``lr_mult`` and ``wd_mult`` (``{}``): by key, a factor of the learning rate, and of the weight decay.
        - ``groups`` (none): a list of dicts, each with ``keys`` and what differs for these:
          ``groups=[{"keys": ["bias"], "wd": 0.0}]``.

        Raises:
            UnknownName: no such optimizer or hyper-parameter.
            ServerError: a server could not make it; carries the server's message.
            Mismatch: this worker's arguments are not rank 0's.
        """
        raise self._unsupported("set_optimizer")

    def set_updater(self, updater: Callable[[int | str, Any, Any], None]) -> None:
        """Update with a function of one's own, instead of an optimizer; local stores only.

        Args:
            updater: is called as ``updater(key, pushed, stored)``, and changes ``stored`` in place. For a table, each
                is a ``RowSparse`` of the rows that are pushed.

        Raises:
            Unsupported: the store is distributed: no code goes to servers.
        """
        raise self._unsupported("set_updater")

    @property
    def learning_rate(self) -> float:
        """The learning rate that this worker has set."""
        raise self._unsupported("learning_rate")

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from this worker's next push on; momentum and other state stay.

        With ``dist_sync`` all workers that set one must set the same for the same round.

        Args:
            lr: the new learning rate, of all keys whose group has none of its own.
        """
        self.set_hyperparameters(learning_rate=lr)

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """Use these from this worker's next push on; what is not given stays. See ``set_learning_rate``.

        With ``dist_sync`` a worker that sets none takes over what others set for the round. A worker that sets any must
        agree with the others on all of them. A number that it has not set counts as the optimizer's own.

        Args:
            learning_rate: the new rate; None leaves it as it is.
            rescale_grad: the new factor of gradients; None leaves it as it is. Without an optimizer it is that of the
                sums of floating point that become the values of arrays: 1 / ``num_workers`` gives means. Half precision
                is rounded after it.
            groups: what changes for each of ``set_optimizer``'s groups, in their order; ``lr`` too.
            others: other hyper-parameters, of all keys whose group has none of its own; of ``lr_mult`` and
                ``wd_mult``, numbers here, of all keys that are in no group.

        Raises:
            UnknownName: no such hyper-parameter.
            UsageError: one that only ``set_optimizer`` can change: a bool, a text, a momentum from or to 0.
        """
        raise self._unsupported("set_hyperparameters")

    @property
    def rescale_grad(self) -> float:
        """The factor of gradients that this worker's pushes ask for: what was set last, or the optimizer's own."""
        raise self._unsupported("rescale_grad")

    def rescaled(self, factor: float) -> AbstractContextManager[None]:
        """Let pushes in this block ask for another ``rescale_grad``; afterwards it is what it was before.

        Args:
            factor: the factor of the gradients that are pushed in the block.
        """
        raise self._unsupported("rescaled")

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        """Let pushes in this block have a weight in their rounds, such as the number of samples behind them.

            with store.weighted(len(inputs)):
                store.pushpull("w", gradient, out=new)

        A round's sum is then the number of its workers times the mean by weight: the sum of each worker's values times
        its weight, divided by the sum of the weights. If all weights are equal, it is the usual sum, to the bit. What
        is pushed outside of such a block has a weight of 1. Integers and tables have no weights.

        Args:
            weight: a finite number, at least 0. If all have 0, they count alike.

        Raises:
            UsageError: each push is an update of its own in this store.
        """
        raise self._unsupported("weighted")

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """Write the optimizer's state of all keys to ``path``, as safetensors; one worker's call suffices.

        With compression, what this worker's encodings lack so far is in it too; then each worker writes a file of its
        own, if the run is to go on exactly as it would have.

        Args:
            path: the file to write. It is replaced in one step, so that it is never half written.
            note: a text that is kept with it, for the caller's own use.
        """
        raise self._unsupported("save_optimizer_states")

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Take the optimizer's state from ``path``; all workers may call it, rank 0's file is the one that counts.

        With compression, a worker also takes what its own encodings lacked, if the file is one that it wrote itself.

        Args:
            path: a file that ``save_optimizer_states`` has written, with any number of workers and servers.

        Raises:
            UsageError: the file is damaged, or belongs to another optimizer.
        """
        raise self._unsupported("load_optimizer_states")

    def is_capable(self, capability: str) -> bool:
        """Whether the store has an ability.

        Args:
            capability: ``optimizer``, the only one there is to ask for; upper or lower case.

        Raises:
            UnknownName: another one.
        """
        if capability.lower() != "optimizer":
            raise UnknownName(f"there is no capability {capability!r}; choose from optimizer")
        return type(self).set_optimizer is not KVStore.set_optimizer

    # ---- checkpoints

    def save_checkpoint(self, *, if_due: bool = False, wait: bool = False) -> int | None:
        """Save a checkpoint of the job; on all workers, at the same point of the program.

        It has the values and optimizer states of all stores of the job whose servers update, after exactly the pushes
        that worker 0 has made, and what was attached. Servers write while training goes on. The job needs a directory:
        ``launch.py --checkpoint-dir``. ``docs/checkpoints.md`` says more.

        Args:
            if_due: save only if ``--checkpoint-every`` says so. For the end of a step: without such calls, a checkpoint
                that is due is made before the first push of the next step.
            wait: return when the checkpoint is complete or has failed; else when servers have noted what to save.

        Returns:
            The number of the checkpoint that was begun; None if there is none, because none was due, the last one is
            still being written, or a state could not be saved. With ``wait``, None also if it has failed since, as far
            as this worker knows. What goes wrong is logged on worker 0, and counted in ``statistics``.

        Raises:
            UsageError: the job has no directory for checkpoints.
            Unsupported: this is no dist store, and ``if_due`` is False.
        """
        if if_due:
            return None
        raise self._unsupported("save_checkpoint")

    def publish(self, keys: Any = None, *, label: str = "", dtype: Any = None) -> int:
        """Make a version that readers can follow.

        Worker 0's call makes it, with its ``keys`` and ``label``, of arrays and tables after exactly the pushes that
        worker 0 has made. Others may call it, too: at the same point of the program their numbers are the same, and
        without worker 0's call nothing is published. With a quorum, later rounds may be over already. In asynchronous
        stores each server takes what it has when it is told. Training goes on at once: the version is there when its
        round is over. ``docs/serving.md`` says more.

        Args:
            keys: one key or a list; None for all of the store. What was published before and is not listed stays as it
                was published last.
            label: a text of your own for readers, such as a step.
            dtype: ``torch.bfloat16`` or ``torch.float16``: what wider floating point of arrays is rounded to. It stays
                for later versions. None: the first version of a key has its own dtype.

        Returns:
            The number of the version: 1, then 2, and so on.

        Raises:
            UsageError: a key is published in another dtype.
            Unsupported: this is no dist store.
        """
        raise self._unsupported("publish")

    def publish_state(self, state_dict: Mapping[str, Any], *, label: str = "", dtype: Any = None) -> int:
        """Publish arrays that are trained elsewhere: worker 0's, by their names, in a store without an optimizer.

        Worker 0 alone may call it; if others do, theirs do not count. Servers compare with what they had, so that
        readers get what has changed. The caller's arrays may change as soon as it returns.

        Args:
            state_dict: arrays by name. Later calls have the same, and perhaps more.
            label: as for ``publish``.
            dtype: as for ``publish``; the same in each call.

        Returns:
            The number of the version.

        Raises:
            UsageError: an array is missing, or its key has a value of ``init``.
            Mismatch: an array has another shape or dtype than before.
            Unsupported: this is no dist store.
        """
        raise self._unsupported("publish_state")

    def attach(self, name: str, thing: Any, *, shared: bool = False, saved: bool = True) -> bool:
        """Let checkpoints of the job save the state of ``thing``, too, and load it now if the job was resumed.

        In a job that goes on without workers that die, one that comes back takes over what is ``shared``, of any size:
        the state that another has when it lets this one in.

        Every worker attaches the same names, before its first push. Where neither is supported, this does nothing.

        Args:
            name: of the thing, within the job.
            thing: an object with ``state_dict`` and ``load_state_dict``, whose state is built of dicts, lists, tensors,
                numbers and texts: a sampler, a scheduler, an optimizer of torch's, a model with buffers.
            shared: the state is the same on all workers, so that worker 0's is saved and all load it. Else each worker
                has its own, which is left out when another number of workers resumes.
            saved: whether checkpoints save it. If False, only workers that come back take it over.

        Returns:
            Whether a state was loaded.

        Raises:
            UsageError: ``thing`` lacks one of the methods.
        """
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"attach({name!r}, ...) takes an object with the methods state_dict and load_state_dict, not "
                f"{type(thing).__name__}"
            )
        return False

    # ---- the job: its workers, and how they wait for each other

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    def members(self) -> list[int]:
        """Return the ranks of the workers that are in the job, as this one knows.

        With ``launch.py --min-workers`` a job goes on without workers that die, and with ``--max-workers`` others are
        added. News of it come with heartbeats, so for a moment workers may know different members.
        """
        return list(range(self.num_workers))

    def on_membership(self, callback: Callable[[list[int]], object]) -> None:
        """Call ``callback`` with the new ``members()`` when workers are lost, come back, or were added.

            def share_out(members):
                batches.batch_size = 512 // len(members)

            store.on_membership(share_out)

        The next ``boundary`` calls it, in the thread that calls that: between two steps, never in the middle of one.
        ``Trainer`` and ``fit`` come there in each step. Workers hear of a change in different steps, so do not set the
        learning rate of a store with rounds here: ``Mismatch`` says that workers push with different ones. It need not
        change, as sums stand for ``num_workers`` workers whoever contributes. What the callback raises, ``boundary``
        raises.

        Raises:
            UsageError: ``callback`` cannot be called.
        """
        if not callable(callback):
            raise UsageError(f"callback must be a function of the members, not a {type(callback).__name__}")

    @property
    def newcomer(self) -> bool:
        """Whether this worker was started again in a job that has gone on, and nobody has let it in yet."""
        return False

    def boundary(self) -> None:
        """Say that this worker is between two steps: its next push is the first of a step.

            store.boundary()  # after init, before the first batch is read
            for inputs, labels in batches:
                ...
                store.pushpull(keys, gradients, weights)
                store.boundary()

        In a job that goes on without workers that die (``launch.py --min-workers``), one that is started again waits
        here until another worker that is here lets it in. It is in all later rounds, and has what is attached to the
        stores as shared; a ``pull`` gives it the weights. In all other cases this does nothing, and costs nothing.
        ``Trainer`` and ``fit`` call it. A program that does not comes back at its first push, when another worker is
        about to push the same key.

        Raises:
            NodeLost: the others have ended.
            DeadlineExceeded: nobody has let this worker in.
        """

    def end_step(self) -> None:
        """Say that a step is over. Its boundary comes later, with ``begin_step``. A trainer of your own calls both.

        In between the program moves its schedules and counters, and a worker that is let in takes these over as they
        are then.
        """

    @property
    def step_ended(self) -> bool:
        """Whether ``end_step`` has been called, and the boundary is still to come or under way."""
        return False

    @property
    def handing_over(self) -> bool:
        """Whether what is attached as shared is read for a worker that comes back, or loaded by it, just now.

        The other workers go on meanwhile. So ``state_dict`` leaves out what the servers have, and ``load_state_dict``
        makes no call for which workers wait for each other.
        """
        return False

    def begin_step(self) -> None:
        """Come to the ``boundary`` that ``end_step`` has left to do, if there is one: before the first push of a step.

        A push to what servers update does it by itself.
        """

    def take_share(
        self, size: int, most: int, *, data: str = "train", epoch: int = 0, used: int = 0, passes: int = 0
    ) -> Share:
        """Take the next samples of an epoch, which no other worker gets.

            while True:
                share = store.take_share(len(order), 64, epoch=epoch, used=used)
                if share.start == share.stop:
                    break
                ...  # train on order[share.start : share.stop]
                used += share.stop - share.start

        Whoever is ready takes the next ones, and what a worker that dies has taken and not used is given to others.
        ``workers.ElasticSampler`` does this for a ``DataLoader``, and says what to do at an epoch's end.

        Args:
            size: how many samples an epoch has; the same on all workers.
            most: how many to take. 0 asks whether the epoch is over, after ``join``: then ``over`` of the result is the
                same on all workers, and False if samples have come back from a worker that died.
            data: the name of the data set.
            epoch: its number. A worker that has begun a later one has used all that it took of earlier ones.
            used: how many samples of the epoch this worker has used, of all that it has taken.
            passes: with ``most=0``, how often this worker has called ``join`` in this epoch.

        Raises:
            Mismatch: another worker has said another ``size``.
        """
        return self._shares.take(0, data, epoch, size, most, used, passes)

    @property
    def min_workers(self) -> int:
        """The job goes on without workers that die as long as so many are left; 0 if the first such death ends it."""
        return 0

    @property
    def max_workers(self) -> int:
        """How many workers there may be at once, with those that are added while the job runs: ranks are below this."""
        return self.num_workers

    @property
    def num_workers(self) -> int:
        """How many workers the job has begun with. Sums of floats stand for so many, whoever dies or is added."""
        return 1

    def barrier(self) -> None:
        """Return when all workers have come to this call.

        Raises:
            DeadlineExceeded: they have not, in time; the message names the missing.
        """

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches, and return when all workers have: Horovod's ``join``.

            for batch in my_batches:  # as many as this worker has
                ...
            store.join()

        Rounds go on without it: from its last push of each key on, sums are over the workers that still push, as if it
        pushed zeros. So gradients that are divided by ``num_workers``, or by the size of the whole batch, go on
        counting each sample the same, and the last rounds of an epoch are small steps. Which rounds a worker is in
        depends on what it has pushed, never on when it calls this. With a quorum, a round is over when so many of
        those who still push are there, and stands for these. In ``dist_async`` and ``dist_ssp`` nobody waits for a
        worker that has joined, which it has once its pushes are answered: a ``pushpull`` with ``wait=False`` too.

        When it returns everybody contributes to the next round again, and a ``pull`` gives what the last round left:
        those who had joined need one. ``barrier`` and ``init`` that need a worker which has joined raise
        ``UsageError``. If nobody has run out early it is a barrier after the last push.

        Args:
            timeout: in seconds; by default the store's deadline, which others' remaining batches may need longer than.

        Returns:
            The rank that joined last: the worker that has pushed most, of several the highest.

        Raises:
            DeadlineExceeded: others have more to do; the message names them. Another call waits on.
            NodeLost: a worker has died, or left without joining.
            UsageError: the join is reserved; the message says what to call instead.
        """
        if self.num_workers > 1:
            raise self._unsupported("join")
        return self.rank

    def begin_join(self, timeout: float | None = None) -> None:
        """Say that this worker has run out of batches, and return at once; ``join`` waits for the others.

        A store that cannot do so does nothing, and says it in ``join``.

        Args:
            timeout: how long to wait for pushes to take effect, in a store whose every push is an update.
        """

    def reserve_join(self, advice: str) -> ReservedJoin:
        """Let calls of ``join`` raise ``UsageError`` with ``advice`` from now on; return what joins all the same.

        For what keeps values in the workers, which ``join`` alone would let part: rounds that a worker is not in change
        the others' values, and no ``pull`` brings them.
        """
        return ReservedJoin(self.begin_join, self.join)

    def report(self, values: Mapping[str, float] | None = None, *, input_s: float = 0.0) -> None:
        """Say how this worker's training goes, for whoever looks at the job; a store without a job ignores it.

            store.report({"loss": loss.item(), "epoch": epoch})

        Nothing is sent at once: it goes with what the worker reports every second or so. ``fit`` calls it.

        Args:
            values: numbers by name, each in place of the last one of its name. Those that are not finite are left out,
                and so are those after 32 names.
            input_s: how long this worker has just waited for the next batch, in seconds. If workers say so, a slow one
                is known to wait for data, or not.
        """

    def traced(self, name: str) -> AbstractContextManager[None]:
        """Show how long a block takes, under this name, in the trace of ``launch.py --trace``.

            with store.traced("forward"):
                loss = model(batch)

        Without a trace, or outside of its rounds, nothing happens. ``fit`` shows forward and backward passes, and
        ``Trainer`` steps.

        Args:
            name: what the block does.
        """
        return nullcontext()

    def num_dead_nodes(self) -> int:
        """How many members of the job are lost; once that has ended the job, this too raises ``NodeLost``."""
        return 0

    # ---- the store itself

    def companion(self) -> KVStore:
        """Return a new store of the same workers and devices that sums what is pushed, whatever this one does with it.

        For sums beside the training: metrics, flags, norms. Every worker calls it at the same point of its program.
        """
        raise self._unsupported("companion")

    @property
    def type(self) -> str:
        """The name that the store was created with."""
        return self._name

    @property
    def check_finite(self) -> bool:
        """Whether a push of NaN or infinite values raises ``NotFinite`` instead of changing values; see ``create``."""
        return False

    def statistics(self) -> Statistics:
        """What the store has done so far."""
        return Statistics()

    def close(self) -> None:
        """Wait for outstanding pushes and end the use of the store. May be called again.

        Raises:
            KVStoreError: a push had failed, and nobody had waited for it.
        """

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def __reduce__(self) -> Any:
        raise Unsupported(
            f"a {self.type!r} store cannot be copied or pickled: it belongs to this process. Make another one with "
            "kvstore.create(), or pass what it holds: pull() its values"
        )

    # ---- MXNet's names for these, which its scripts use

    def _barrier(self) -> None:
        self.barrier()

    def _set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        self.set_updater(updater)

    def _send_command_to_servers(self, head: int, body: Any) -> None:
        raise Unsupported("servers take no commands; call set_optimizer, set_hyperparameters, set_gradient_compression")

    # ---- for subclasses: keys are checked and grouped, values are lists with one entry per device

    def _init(self, values: dict[Key, list[Any]], listed: list[Key]) -> None:
        raise self._unsupported("init")

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        raise self._unsupported("push")

    def _pull(self, outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        raise self._unsupported("pull")

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        raise self._unsupported("pushpull")

    def _pull_rows(self, requests: RowRequests, priority: int) -> Ticket:
        raise self._unsupported("row_sparse_pull")

    def _pushpull_rows(self, values: dict[Key, list[Any]], requests: RowRequests, priority: int, copy: bool) -> Ticket:
        raise self._unsupported("pushpull with row_ids")

    def _pairs(self, key: Any, value: Any) -> dict[Key, list[Any]]:
        pairs = group(key, value)
        one_kind(pairs, self._kind)
        return pairs

    def _arrays_of(self, outs: dict[Key, list[Any]]) -> dict[Key, list[Any]]:
        """Return those of ``outs`` whose keys have arrays, no tables."""
        return outs

    def _warn_left_out(self, tables: Sequence[Key]) -> None:
        """Warn, once for each store, that ``pull`` leaves these keys out."""
        if not self._warned_left_out:
            self._warned_left_out = True
            warnings.warn(
                f"pull leaves out tables ({shorten(tables)}): use row_sparse_pull, or ignore_sparse=False for all rows",
                stacklevel=4,
            )

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"a {self._name!r} store has no {what}")

    @staticmethod
    def register(cls: T) -> T:
        """Class decorator: make ``create`` know the class by its lower-case name, and call it with its options.

        Args:
            cls: a subclass of ``KVStore``.

        Raises:
            UsageError: it is something else.
        """
        if not (isinstance(cls, type) and issubclass(cls, KVStore)):
            raise UsageError(f"only a subclass of KVStore can be registered, not {cls!r}")
        register(cls.__name__.lower(), cls)
        return cls
