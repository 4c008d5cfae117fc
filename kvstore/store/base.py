"""KVStore, the interface. Imports torch only when a store is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvstore.dynamo import outside_graphs
from kvstore.errors import Unsupported, UsageError
from kvstore.spec import Key, as_shape
from kvstore.store.arguments import group, one_kind, requests_of
from kvstore.store.checkpoint_interface import CheckpointInterface
from kvstore.store.job_interface import JobInterface
from kvstore.store.optimizer_interface import OptimizerInterface
from kvstore.store.registry import register
from kvstore.store.statistics import Statistics
from kvstore.store.table_interface import TableInterface
from kvstore.ticket import Ticket, claim, finish

T = TypeVar("T", bound="type[KVStore]")


@outside_graphs
class KVStore(OptimizerInterface, TableInterface, CheckpointInterface, JobInterface):
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
        """Give methods that say no more than "See ``KVStore``." what is said there: a user asks a store for help."""
        super().__init_subclass__(**options)
        outside_graphs(cls)
        for owner in cls.__mro__[: cls.__mro__.index(KVStore)]:
            for name, member in vars(owner).items():
                if getattr(member, "__doc__", None) == "See ``KVStore``.":
                    member.__doc__ = getattr(KVStore, name).__doc__

    _on_pull: Callable[[Any], None] | None = None

    def __init__(self, name: str = "") -> None:
        self._name = name or type(self).__name__.lower()
        self._kind: type | None = None

    # ---- values

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

        What an encoding lacks is kept and goes with the next push of the key. Integers are sent as they are.

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
            Unsupported: this store sends nothing.
        """
        raise self._unsupported("set_gradient_compression")

    # ---- the store itself

    def watch_pulls(self, on_pull: Callable[[Any], None]) -> None:
        """Have ``on_pull`` called with each ``out`` that the program passes to ``pull``, before it is written.

        For what must tell the store's own values from others that the program writes to the same arrays.
        """
        self._on_pull = on_pull

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

    # MXNet's names for these, which its scripts use.
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

    def _pairs(self, key: Any, value: Any) -> dict[Key, list[Any]]:
        pairs = group(key, value)
        one_kind(pairs, self._kind)
        return pairs

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
