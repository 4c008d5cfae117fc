"""The part of KVStore, the interface, that is about tables of rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.spec import Key, shorten
from kvstore.store.arguments import RowRequests, requests_of
from kvstore.store.named import Named
from kvstore.ticket import Ticket, claim

if TYPE_CHECKING:
    from kvstore.rows.row_sparse import RowSparse


class TableChanges(NamedTuple):
    """What one worker knows of the changes of a table. Rows that were pulled before it differs may be old.

    Attributes:
        changes: how often this worker has pushed to the table or changed it otherwise, and how many barriers it has
            passed, for another worker may have changed the table before one.
        loads: how often ``load_table`` has been called: what was computed from rows before it belongs to rows that are
            no longer there.
    """

    changes: int
    loads: int


class TableInterface(Named):
    """A store as what holds tables: rows are pulled by their ids, and tables are saved and loaded."""

    _warned_left_out = False

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

    # ---- for subclasses: keys are checked and grouped

    def _pull_rows(self, requests: RowRequests, priority: int) -> Ticket:
        raise self._unsupported("row_sparse_pull")

    def _pushpull_rows(self, values: dict[Key, list[Any]], requests: RowRequests, priority: int, copy: bool) -> Ticket:
        raise self._unsupported("pushpull with row_ids")

    def _warn_left_out(self, tables: Sequence[Key]) -> None:
        """Warn, once for each store, that ``pull`` leaves these keys out."""
        if not self._warned_left_out:
            self._warned_left_out = True
            warnings.warn(
                f"pull leaves out tables ({shorten(tables)}): use row_sparse_pull, or ignore_sparse=False for all rows",
                stacklevel=4,
            )

    def _arrays_of(self, outs: dict[Key, list[Any]]) -> dict[Key, list[Any]]:
        """Return those of ``outs`` whose keys have arrays, no tables."""
        return outs
