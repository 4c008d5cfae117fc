"""What all parts of the interface have: the store's name, and the error for what it does not do."""

from __future__ import annotations

from kvstore.errors import Unsupported


class Named:
    """A store with a name."""

    _name: str

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"a {self._name!r} store has no {what}")
