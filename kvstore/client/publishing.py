"""Publishing, as one worker takes part: all count the versions, and worker 0 has the servers make them."""

from __future__ import annotations

from typing import Any

from kvstore import wire
from kvstore.client.entries import Entries
from kvstore.client.requests import Requests
from kvstore.client.resuming import TrainedStore
from kvstore.errors import UsageError
from kvstore.lineage import new_lineage
from kvstore.member.outstanding import Question, ready
from kvstore.spec import Key
from kvstore.wire.versions import PUBLISHED


class Publishing:
    """The versions of one store; ``number`` is that of the last one."""

    def __init__(self, requests: Requests, store: TrainedStore) -> None:
        self.number = 0
        self._requests, self._store = requests, store
        self._lineage = new_lineage()

    def publish(self, keys: Any, label: str, dtype: Any) -> int:
        """Have all servers make a version of what this worker has pushed; return its number.

        It returns when they have noted it: no round that this worker takes part in can be over before.
        """
        rounded = _rounded(dtype)
        if not isinstance(label, str) or len(label) > MOST_LABEL:
            raise UsageError(f"label={label!r} must be a text of at most {MOST_LABEL} characters")
        entries = self._store.entries
        chosen = self._chosen(keys, entries)
        number = self.number + 1
        if self._requests.session.rank == 0:
            self._ask(chosen, number, label, rounded)
        self.number = number
        return number

    def _chosen(self, keys: Any, entries: Entries) -> list[Key]:
        """Return the keys of arrays among ``keys``; the rows of tables are not published."""
        if keys is None:
            return [key for key in entries if key not in entries.tables]
        listed = list(keys) if isinstance(keys, list | tuple) else [keys]
        for key in listed:
            if key in entries.tables:
                raise UsageError(f"key {key!r} is a table, and arrays alone are published")
            entries[key]  # raises what a push would
        return listed

    def _ask(self, keys: list[Key], number: int, label: str, rounded: str | None) -> None:
        requests, entries, pushed = self._requests, self._store.entries, self._store.clocks.pushed
        session = requests.session
        segments: dict[int, tuple[list[int], list[int]]] = {server: ([], []) for server in range(len(session.servers))}
        for key in dict.fromkeys(keys):
            entry = entries[key]
            for segment in entry.segments:
                ids, clocks = segments[segment.server]
                ids.append(segment.id)
                clocks.append(int(pushed[entry.place]))
        fields = {"store": requests.store, "lineage": self._lineage, "number": number, "label": label}
        operation = requests.operation("publish", keys)
        questions = [
            Question(
                session.servers[server],
                operation,
                wire.Publish,
                {**fields, "rounded": rounded, "ids": ids, "clocks": clocks},
            )
            for server, (ids, clocks) in segments.items()
        ]
        session.client.exchange(operation, ready, questions)


MOST_LABEL = 256  # characters


def _rounded(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in PUBLISHED:
        raise UsageError(f"dtype={dtype!r} is not valid; valid: {', '.join(PUBLISHED)}, or None for the arrays' own")
    return name
