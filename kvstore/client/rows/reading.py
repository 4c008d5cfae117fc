"""A whole table as it was at one moment, read page by page from all servers while training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from kvstore import wire
from kvstore.client.requests import Requests
from kvstore.errors import WireError
from kvstore.lineage import Version
from kvstore.member.outstanding import Question, ready
from kvstore.member.session import Session
from kvstore.rows.frozen_rows import Page
from kvstore.rows.ids import Ids
from kvstore.rows.stripe import PartSpec
from kvstore.rows.table_files import FrozenState
from kvstore.spec import ITEMSIZE
from kvstore.table import Table

PAGE = 4 << 20  # bytes of rows, and of what belongs to them, that a server is asked for at a time


class TableReading:
    """See the module. In a ``with`` block, whose end lets the servers go on without keeping anything.

    Args:
        session: this process's membership in the job.
        requests: of the store.
        table: what the table is.
        stripes: what each server has kept, in the order of servers.

    Attributes:
        stripes: see above.
        whole: why all rows are read, though only changes were asked for; empty if it is what was asked for.
    """

    def __init__(self, session: Session, requests: Requests, table: Table, stripes: Sequence[wire.Frozen]) -> None:
        self.stripes = stripes
        self.whole = next((frozen.whole for frozen in stripes if frozen.whole), "")
        self._session = session
        self._requests = requests
        self._table = table

    def __enter__(self) -> TableReading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        operation = self._requests.operation("reading a table")
        questions = [
            Question(peer, operation, wire.Thaw, {"store": self._requests.store, "number": frozen.number})
            for peer, frozen in zip(self._session.servers, self.stripes, strict=True)
        ]
        self._session.client.submit(operation, ready, questions)

    @property
    def version(self) -> int:
        """How many updates the table had had; where its stripes differ, the most."""
        return max(Version(*frozen.at).number for frozen in self.stripes)

    @property
    def steps(self) -> int:
        """How many of these the optimizer had made; where the stripes differ, the most."""
        return max(frozen.steps for frozen in self.stripes)

    def state(self, rule: str | None) -> FrozenState:
        """Return what a save says of the table; ``rule`` is the optimizer's."""
        first = self.stripes[0]
        parts = {
            name: PartSpec(dtype, columns)
            for name, dtype, columns in zip(first.names, first.dtypes, first.columns, strict=True)
        }
        versions = [Version(*frozen.at) for frozen in self.stripes]
        return FrozenState(versions, [frozen.steps for frozen in self.stripes], parts, rule, self.whole)

    def pages(self, state: bool = True) -> Iterator[Page]:
        """Yield all rows, some of one server's at a time; stripes take turns.

        Args:
            state: whether to read what belongs to each row beside its values, too.
        """
        row = self._table.row_bytes + 8
        counts = []
        for frozen in self.stripes:
            parts = zip(frozen.dtypes, frozen.columns, strict=True) if state else ()
            counts.append(max(1, PAGE // (row + sum(ITEMSIZE[dtype] * max(1, columns) for dtype, columns in parts))))
        slots = [frozen.slots for frozen in self.stripes]
        for server, reply in self._read(slots, counts, gone=False, state=state):
            page = self._page(self.stripes[server], reply, state)
            if len(page.ids):
                yield page

    def gone_pages(self) -> Iterator[Ids]:
        """Yield the ids of all rows that have gone since the version that the reading began at."""
        counts = [PAGE // 8] * len(self.stripes)
        for _, reply in self._read([frozen.gone for frozen in self.stripes], counts, gone=True, state=False):
            yield _array(reply.buffers[0], "int64", reply.count, 0)

    def _read(
        self, lengths: Sequence[int], counts: Sequence[int], gone: bool, state: bool
    ) -> Iterator[tuple[int, wire.FrozenPage]]:
        """Yield the pages of all servers; each server is asked for so many of its so many rows at a time."""
        starts = [0] * len(lengths)
        while any(start < length for start, length in zip(starts, lengths, strict=True)):
            operation = self._requests.operation("reading a table")
            replies: dict[int, wire.FrozenPage] = {}
            questions = []
            for server, (start, length, count) in enumerate(zip(starts, lengths, counts, strict=True)):
                if start >= length:
                    continue
                fields: dict[str, Any] = {
                    "store": self._requests.store,
                    "number": self.stripes[server].number,
                    "start": start,
                    "count": min(count, length - start),
                    "gone": gone,
                    "state": state,
                }
                peer = self._session.servers[server]
                questions.append(
                    Question(peer, operation, wire.ReadFrozen, fields, partial(replies.__setitem__, server))
                )
                starts[server] += count
            self._session.client.exchange(operation, ready, questions)
            yield from replies.items()

    def _page(self, frozen: wire.Frozen, reply: wire.FrozenPage, state: bool) -> Page:
        """Return what a reply brings, as a copy: its memory is the server's."""
        names = frozen.names if state else []
        if len(reply.buffers) != 2 + len(names):
            raise WireError(f"expected {2 + len(names)} buffers of a page of rows, got {len(reply.buffers)}")
        ids, rows, *parts = reply.buffers
        described = zip(names, frozen.dtypes, frozen.columns, parts, strict=False)
        return Page(
            _array(ids, "int64", reply.count, 0),
            _array(rows, self._table.dtype, reply.count, self._table.width),
            {name: _array(part, dtype, reply.count, columns) for name, dtype, columns, part in described},
        )


def _array(buffer: wire.Buffer, dtype: str, count: int, columns: int) -> Any:
    """Return a copy of ``buffer`` as ``count`` rows of so many columns; with 0, of one dimension."""
    if len(buffer) != count * max(1, columns) * ITEMSIZE[dtype]:
        raise WireError(f"expected {count} rows of {max(1, columns)} {dtype}, got {len(buffer)} bytes")
    flat = np.frombuffer(buffer, dtype).copy()
    return flat.reshape(count, columns) if columns else flat
