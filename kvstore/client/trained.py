"""A store as the checkpoints see it: what they save of it, and what it gets from the one that is resumed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvstore.client.clocks import PushClocks
from kvstore.client.optimizer import Optimizing
from kvstore.client.plans.entries import Entries
from kvstore.client.pushes import Pushes
from kvstore.client.requests import Requests
from kvstore.client.restored_tables import RestoredTables
from kvstore.client.resuming import Resumed
from kvstore.client.rows.stored import StoredTables
from kvstore.client.saving import SavedStore
from kvstore.errors import CheckpointError
from kvstore.rule import Rule
from kvstore.spec import Key, Spec, shorten

log = logging.getLogger(__name__)

RESIDUALS = "residuals"  # the name, with a store's ordinal, under which a worker saves those of its compression


class TrainedStore:
    """What the checkpoints need of a store.

    Args:
        ordinal: it is the n-th store that each worker has made.
        rule, requests, entries, clocks, optimizing, pushes, stored: of the store.

    Attributes:
        tables: gives the servers a checkpoint's.
    """

    def __init__(
        self,
        ordinal: int,
        rule: Rule,
        requests: Requests,
        entries: Entries,
        clocks: PushClocks,
        optimizing: Optimizing,
        pushes: Pushes,
        stored: StoredTables,
    ) -> None:
        self.ordinal, self.rule, self.requests = ordinal, rule, requests
        self.entries, self.clocks, self.optimizing = entries, clocks, optimizing
        self.pushes = pushes
        self.tables = RestoredTables(ordinal, stored, optimizing)
        self.begun = 0  # the highest round that this worker has begun
        self.restored: dict[Key, None] = {}  # keys with a checkpoint's values, whose states are not on servers yet
        self.has_residuals = False  # whether the compression has the checkpoint's
        self._trains: bool | None = None

    @property
    def in_step(self) -> bool:
        """Whether all workers make the same rounds."""
        return self.rule.mode == "sync" and self.rule.quorum is None

    @property
    def trains(self) -> bool:
        """Whether the servers update with an optimizer; other stores have nothing to save. Known from a push on."""
        if self._trains is None:
            self._trains = self.optimizing.optimizer is not None or self.requests.optimizer() is not None
        return self._trains

    def optimizer_set(self) -> None:
        """Note that there is an optimizer."""
        self._trains = True

    @property
    def rounds(self) -> int:
        """The highest round that this worker has pushed."""
        return int(self.clocks.pushed[: len(self.entries)].max(initial=0))

    def saved(self) -> SavedStore:
        """Return what a checkpoint of this moment has of the store."""
        entries = Entries()
        entries.add(self.entries)
        clocks = self.clocks.pushed[: len(entries)].tolist()
        return SavedStore(self.requests.store, self.ordinal, self.rule.mode, entries, clocks)

    @property
    def compresses(self) -> bool:
        """Whether the compression has residuals, which are this worker's own."""
        return self.pushes.compressing is not None

    @property
    def residuals_name(self) -> str:
        """The name under which a worker saves the residuals."""
        return f"{RESIDUALS}.{self.ordinal}"

    def residuals(self) -> Any:
        """Return the state of the compression; None without."""
        how = self.pushes.compressing
        if how is None:
            return None
        self.pushes.flush()  # what is still to be encoded changes the residuals
        return how.state()

    # ---- from a checkpoint

    def first_values(
        self, resumed: Resumed, keys: Sequence[Key], specs: Sequence[Spec], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the first values of ``keys``: the checkpoint's, where it has them, else those given."""
        known = [resumed.has(self.ordinal, key) for key in keys]
        self.restored.update(dict.fromkeys(key for key, has in zip(keys, known, strict=True) if has))
        if not all(known) and resumed.has_store(self.ordinal):
            new = [key for key, has in zip(keys, known, strict=True) if not has]
            log.warning("%s does not have %s: what init was given is used", resumed, shorten(new))
        return [
            resumed.value(self.ordinal, key, spec) if has else value
            for key, spec, value, has in zip(keys, specs, values, known, strict=True)
        ]

    def give_states(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers the checkpoint's states of ``entries``, if there is an optimizer already; once."""
        if self.optimizing.optimizer is None:
            return
        self.tables.put_states(resumed, entries)
        keys = [key for key in self.restored if key in entries]
        if not keys:
            return
        optimizer, states = resumed.states(self.ordinal, keys)
        if optimizer is not None:
            self.optimizing.restore(optimizer, states, entries, str(resumed))
        for key in keys:
            del self.restored[key]

    def give_residuals(self, resumed: Resumed) -> None:
        """Give the compression, before the first push, the checkpoint's residuals of this worker."""
        how = self.pushes.compressing
        if how is None:
            return
        self.has_residuals = True
        state = resumed.part(self.residuals_name, shared=False)
        if state is None:
            return
        if not isinstance(state, tuple) or [type(each) for each in state] != [dict, dict]:
            raise CheckpointError(f"{resumed}: damaged: the residuals of a worker are not tensors and options")
        tensors, plain = state
        if plain.get("compression") == how.compression.options():
            how.load_state(tensors, plain, resumed.shapes(self.ordinal))
        else:
            log.warning("%s: the residuals of another compression are left out", resumed)
