"""Publishing, as one worker takes part: all count the versions, and worker 0 has the servers make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvstore import wire
from kvstore.client.entries import Entries
from kvstore.client.plans import Plan
from kvstore.client.requests import Requests
from kvstore.client.resuming import TrainedStore
from kvstore.errors import UsageError
from kvstore.lineage import lineage_of, new_lineage
from kvstore.spec import Key, require_same, shorten, without_value
from kvstore.values import Leaving, as_dtype, as_tensor, spec_of
from kvstore.values.any_arrays import Column
from kvstore.wire.versions import PUBLISHED, published_as


class Publishing:
    """The versions of one store; ``number`` is that of the last one."""

    def __init__(self, requests: Requests, store: TrainedStore) -> None:
        self.number = 0
        self._requests, self._store = requests, store
        # Where another worker may have to go on with the versions of one that is lost, both have the same lineage.
        config, ordinal = requests.session.config, requests.ordinal
        self._lineage = lineage_of(f"{config.job} {ordinal}") if config.min_workers else new_lineage()
        self._dtypes: dict[Key, str] = {}  # what each key is published as
        self._put: list[tuple[list[Key], int]] = []  # keys whose values ``put`` gives, with the bytes of a message
        self._begun = 0  # the highest round that this worker has begun
        self._rounds = 0  # those that the last version by ``publish_rounds`` has

    def before(self, every: int, places: Column) -> None:
        """Publish after ``every`` rounds, if a push of the keys at ``places`` begins the next one."""
        rounds = int(self._store.clocks.pushed[places].max(initial=0))
        if rounds < self._begun:  # a step may push its keys one by one: the first of these pushes begins the round
            return
        self._begun = rounds + 1
        self.publish_rounds(rounds, every)

    def publish_rounds(self, rounds: int, every: int) -> None:
        """Publish ``rounds``, which all keys have, if they are a multiple of ``every`` and not published yet."""
        if rounds > self._rounds and rounds % every == 0 and self._store.trains:
            self._rounds = rounds
            self.publish(None, f"round {rounds}", None)

    def publish(self, keys: Any, label: str, dtype: Any) -> int:
        """Have all servers make a version of what this worker has pushed; return its number.

        It returns when they have noted it: no round that this worker takes part in can be over before.
        """
        rounded = _rounded(dtype)
        # No message can have halves of surrogate pairs.
        if not isinstance(label, str) or len(label) > MOST_LABEL or any("\ud800" <= each <= "\udfff" for each in label):
            raise UsageError(f"label={label!r:.300} must be a text of at most {MOST_LABEL} characters")
        entries = self._store.entries
        chosen = self._chosen(keys, entries)
        self._dtypes |= self._published_as(chosen, entries, rounded)
        # Counted before anybody is asked: after an exception some servers may have the version, and numbers must rise.
        first = not self.number
        number = self.count()
        if self._requests.session.leads:
            last = self._ask(chosen, number, label, rounded)
            if first and last > number:  # a lost worker has published alone, and this one has not counted that
                self.number = last
                number = self.count()
                self._ask(chosen, number, label, rounded)
        return number

    def count(self) -> int:
        """Count a version that worker 0 makes; return its number."""
        self.number += 1
        return self.number

    # ---- states of arrays that are elsewhere

    def rounded(self, state: Mapping[Any, Any], dtype: Any) -> dict[Any, torch.Tensor]:
        """Return the arrays of ``state`` as they are published."""
        rounded = _rounded(dtype)
        tensors = {}
        for key, array in state.items():
            try:
                tensors[key] = as_tensor(array)
            except UsageError as exc:
                raise UsageError(f"{key!r} cannot be published, so leave it out of state_dict: {exc}") from None
        return {
            key: tensor.to(as_dtype(published_as(spec_of(tensor).dtype, rounded))).contiguous()
            for key, tensor in tensors.items()
        }

    def put_first(self, keys: Sequence[Key], most: int) -> None:
        """Note that ``keys`` have been given their first values, in messages of ``most`` bytes."""
        self._put.append((list(keys), most))

    def put(self, state: Mapping[Any, torch.Tensor]) -> None:
        """Replace the values on the servers by those of ``state``; keys that it adds come later."""
        entries = self._store.entries
        known = {key for keys, _ in self._put for key in keys}
        for key, tensor in state.items():
            if key in entries and key not in known:
                raise UsageError(f"key {key!r} has a value that init() gave it: publish() publishes that")
            if key in known:
                require_same(key, entries[key].spec, spec_of(tensor), "state_dict has")
        if missing := [key for key in known if key not in state]:
            raise UsageError(f"state_dict lacks {shorten(missing)}, which it has had before")
        for keys, most in self._put:
            # As init has sent them: servers take the same segments together, as often as they come.
            self._requests.put_values(Plan(entries, keys, most), Leaving([state[key] for key in keys]))

    # ---- helpers

    def _chosen(self, keys: Any, entries: Entries) -> list[Key]:
        if keys is None:
            return list(entries)
        listed = [keys] if isinstance(keys, str | int) or not isinstance(keys, Iterable) else list(keys)
        for key in listed:
            if key not in entries:
                raise without_value(key, entries, " on this worker")
        return listed

    def _published_as(self, keys: list[Key], entries: Entries, rounded: str | None) -> dict[Key, str]:
        """Return the dtype in which each key is published.

        It is checked here, too: if one server refused a version that another has made, no reader would ever have it.
        """
        dtypes = {}
        for key in keys:
            if key in entries.tables:  # rows have the table's own dtype
                continue
            wanted = published_as(entries.specs[entries.kinds[entries.places[key]]].dtype, rounded)
            dtypes[key] = self._dtypes.get(key, wanted)
            if rounded and dtypes[key] != wanted:
                raise UsageError(f"key {key!r} is published as {dtypes[key]}, and cannot be published as {wanted}")
        return dtypes

    def _ask(self, keys: list[Key], number: int, label: str, rounded: str | None) -> int:
        """Have servers make a version; return the highest number that they have been asked for."""
        entries, pushed = self._store.entries, self._store.clocks.pushed
        servers = range(len(self._requests.session.servers))
        segments: dict[int, tuple[list[int], list[int]]] = {server: ([], []) for server in servers}
        for key in dict.fromkeys(keys):
            entry = entries[key]
            for segment in entry.segments:
                ids, clocks = segments[segment.server]
                ids.append(segment.id)
                clocks.append(int(pushed[entry.place]))
        fields = {"lineage": self._lineage, "number": number, "label": label, "rounded": rounded}
        own = {server: {**fields, "ids": ids, "clocks": clocks} for server, (ids, clocks) in segments.items()}
        replies: dict[int, wire.PublishNoted] = self._requests.each("publish", keys, wire.Publish, own)
        return max(reply.last for reply in replies.values())


MOST_LABEL = 256  # characters


def _rounded(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in PUBLISHED:
        raise UsageError(f"dtype={dtype!r} is not valid; valid: {', '.join(PUBLISHED)}, or None for the arrays' own")
    return name
