"""A store in this process that notes what it is asked for."""

from __future__ import annotations

from typing import Any

from kvstore import Ticket
from kvstore.store.local import LocalStore


class Recorded(LocalStore):
    """``local``, with a list of the calls: their names, and by key how many rows are pushed, how many are wanted."""

    def __init__(self, optimizer: str = "sgd", **options: Any) -> None:
        super().__init__("local")
        self.calls: list[tuple[str, dict[Any, int], dict[Any, int]]] = []
        self.set_optimizer(optimizer, **{"learning_rate": 0.1, **options})

    def names(self) -> list[str]:
        """The names of the calls so far, which are then forgotten."""
        names, self.calls = [name for name, _, _ in self.calls], []
        return names

    def push(self, key: Any, value: Any, priority: int = 0, *, wait: bool = False) -> Ticket:
        if isinstance(key, list):
            self.calls.append(("push", dict(zip(key, map(len, value), strict=True)), {}))
        return super().push(key, value, priority, wait=wait)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, *, wait: bool = True
    ) -> Any:
        if isinstance(key, list):
            self.calls.append(("pull", {}, dict(zip(key, map(len, row_ids), strict=True))))
        return super().row_sparse_pull(key, out, priority, row_ids, wait=wait)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, **more: Any) -> Ticket:
        if more.get("row_ids") is not None:
            wanted = dict(zip(key, map(len, more["row_ids"]), strict=True))
            self.calls.append(("pushpull", dict(zip(key, map(len, value), strict=True)), wanted))
        return super().pushpull(key, value, out, priority, **more)
