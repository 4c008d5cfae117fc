"""What one worker knows of its store's keys, and the plans of the lists of them that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvstore.errors import KeyNotInitialised
from kvstore.plan import Plan
from kvstore.shares import Entry
from kvstore.spec import Key

MOST = 1024  # plans that are kept
_KEYS = {int, str}


class Plans:
    """Makes plans, and keeps them: a list of keys that comes again costs no look at each of them.

    Args:
        piece: bytes that a message should have.

    Attributes:
        entries: what is known of each key that this worker has passed to ``init``.
    """

    def __init__(self, piece: int) -> None:
        self.entries: dict[Key, Entry] = {}
        self._piece = piece
        self._fold, self._small = 1, 0
        self._made: dict[tuple[Key, ...], Plan] = {}

    def add(self, entries: Mapping[Key, Entry]) -> None:
        """Take new keys."""
        self.entries.update(entries)
        self._made.clear()

    def fold(self, times: int, small: int) -> None:
        """From now on let messages be of so many times more bytes, and arrays of so few elements share payloads."""
        self._fold, self._small = times, small
        self._made.clear()

    def of(self, keys: Iterable[Key]) -> Plan:
        """Return the plan for ``keys``, each of which is listed once.

        Raises:
            KeyNotInitialised: this worker does not know one of them.
        """
        listed = tuple(keys)
        plan = self._made.get(listed)
        if plan is None:
            for key in listed:
                if key not in self.entries:
                    raise KeyNotInitialised(f"key {key!r} has no value on this worker; call init first")
            if len(self._made) >= MOST:
                self._made.clear()
            plan = self._made[listed] = Plan(self.entries, listed, self._piece * self._fold, self._small)
        return plan

    def plain(self, key: Any, *arrays: Any) -> tuple[Plan, list[Sequence[torch.Tensor]]] | None:
        """Return the plan for ``key``, or a list of them, and ``arrays``: if it is kept, and they are plain.

        None says that all may be right all the same, or wrong.
        """
        several = isinstance(key, list | tuple)
        listed = tuple(key) if several else (key,)
        plan = self._made.get(listed) if _KEYS.issuperset(map(type, listed)) else None
        if plan is None:
            return None
        found: list[Sequence[torch.Tensor]] = []
        for its in arrays:
            tensors = plan.plain(its if several else [its])
            if tensors is None:
                return None
            found.append(tensors)
        return plan, found
