"""What all calls of a store need: who this worker is, and what has gone wrong since the last call."""

from __future__ import annotations

from kvstore.client.pushes import Pushes
from kvstore.errors import UsageError
from kvstore.member.session import Session


class StoreCalls:
    """The base of a ``DistStore``'s parts, each of which has some of its calls."""

    _closed: bool
    _pushes: Pushes
    _session: Session

    @property
    def rank(self) -> int:
        """See ``KVStore``."""
        return self._session.rank

    @property
    def num_workers(self) -> int:
        """See ``KVStore``."""
        return self._session.num_workers

    def _check(self) -> None:
        """Raise what has gone wrong since the last call."""
        if self._closed:
            raise UsageError("this store is closed")
        self._pushes.check()
