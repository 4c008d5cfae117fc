"""Followers: arrays of the program that become, version by version, what a running job publishes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from kvstore import wire
from kvstore.dynamo import outside_graphs
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, Mismatch, UsageError, WireError
from kvstore.lineage import UNKNOWN
from kvstore.reading.held import HeldValue
from kvstore.reading.published_copy import CopyMemory, Published, PublishedCopy, VersionAsk
from kvstore.reading.reader_session import Ask, ReaderSession
from kvstore.reading.shared_copy import SharingStalled
from kvstore.spec import Key, shorten
from kvstore.table import TableSpec
from kvstore.values import as_output
from kvstore.wire.versions import NEVER

log = logging.getLogger(__name__)

AT_ONCE = 3  # questions to one server: it makes an answer while this process takes one, and one is on its way
MOST_DAMAGED = 3  # pieces that are fetched again in one update
LEAST_PAUSE_S, MOST_PAUSE_S = 0.005, 0.1  # between two questions whether there is a newer version


class Source(NamedTuple):
    """What a follower has of its reader."""

    find: Callable[[Sequence[Key], float], list[HeldValue]]
    keys: Callable[[float], list[Key]]  # those that have values; with a deadline
    ask: Callable[..., None]  # ``Reader._ask``
    session: ReaderSession
    lock: AbstractContextManager[Any]
    # With other readers of the host; None: alone.
    share: Callable[[int, Mapping[Key, Published]], CopyMemory | None] | None


@outside_graphs
class Follower:
    """Arrays that become each newer version of what a job publishes, whole; ``Reader.follow`` makes it.

    Read the arrays, and do not write into them: an update writes what has changed, and no more. One thread at a time
    uses a follower.

    Args:
        arrays: what is written, by name.
        names: the key under which each is published.
        strict: see ``Reader.follow``.
        on_update: see ``Reader.follow``.
        source: its reader.

    Attributes:
        version: the number of the version that the arrays are of; 0 before the first.
        label: what was given to ``publish`` with it.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        names: Mapping[str, Key],
        strict: bool,
        on_update: Callable[[list[str]], object] | None,
        source: Source,
    ) -> None:
        self.version, self.label = 0, ""
        # What cannot be written to is refused if it is published, and else left as it is.
        self._refused: dict[str, UsageError] = {}
        self._arrays: dict[str, torch.Tensor] = {}
        for name, array in arrays.items():
            try:
                self._arrays[name] = _target(array)
            except UsageError as exc:
                self._refused[name] = UsageError(f"{name!r} cannot follow: {exc}")
                if strict:
                    raise self._refused[name] from None
        self._names, self._strict, self._on_update = dict(names), strict, on_update
        self._source, self._session = source, source.session
        self._copy: PublishedCopy | None = None
        self._alone = False  # whether this copy is not shared, because others hold it up
        self._store = 0
        self._lineage = UNKNOWN
        self._missing: list[Key] = []  # what had no value when this was looked at last
        self._torn = False  # whether an exception has come in while the arrays were written

    def update(self, *, timeout: float | None = None) -> bool:
        """Have the newest version; return whether it is another one than before.

        Until all of it is here, the arrays stay as they are.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            KeyNotInitialized: an array is not published; see ``strict`` of ``Reader.follow``.
            Mismatch: an array has another shape than what is published.
            DeadlineExceeded: it did not come in time. The next call goes on with what has come.
            NodeLost: the job has failed, or has ended.
        """
        with self._source.lock:
            return self._update(self._session.deadline(timeout))

    def wait_newer(self, timeout: float | None = None) -> int:
        """Return when there is another version, and the arrays are of it: its number.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            DeadlineExceeded: there was none in time.
            KVStoreError: see ``update``.
        """
        deadline = self._session.deadline(timeout)
        pause = LEAST_PAUSE_S
        while True:
            try:
                with self._source.lock:
                    if (self._copy is None or self._wait(deadline)) and self._update(deadline):
                        return self.version
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(f"no version after {self.version} has come in time: {exc}", exc.silent) from None
            if self._session.now() + pause >= deadline:
                why = "none was published, or its round is not over"
                if self._missing:
                    why = f"{shorten(self._missing)} has no value yet"
                raise DeadlineExceeded(f"no version after {self.version} has come in time: {why}")
            self._session.pause(pause)  # until the first version
            pause = min(MOST_PAUSE_S, 1.5 * pause)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each newer version when the arrays are of it. A slow loop skips some. Never ends."""
        while True:
            with suppress(DeadlineExceeded):
                yield self.wait_newer()

    # ---- which arrays

    def _keys(self, deadline: float) -> list[Key]:
        """Return the keys that have values; none before the store is made."""
        try:
            return self._source.keys(deadline)
        except KeyNotInitialized:
            return []

    def _found(self, deadline: float) -> PublishedCopy | None:
        """Return what is fetched, once the arrays are known; None while nothing is published."""
        if self._copy is not None:
            return self._copy
        keys = self._keys(deadline)
        known = set(keys)
        missing = self._missing = [key for key in dict.fromkeys(self._names.values()) if key not in known]
        if not keys:
            return None
        wanted = [key for key in dict.fromkeys(self._names.values()) if key in known]
        some, *found = self._source.find([keys[0], *wanted], deadline)
        self._store = some.store
        if not self._newest(some.segments[0].server, deadline)[1]:
            return None
        values = {value.key: value for value in found}
        tables = [key for key, value in values.items() if isinstance(value.spec, TableSpec)]
        dtypes = self._dtypes([values[key] for key in values if key not in tables], deadline)
        if dtypes is None:
            return None
        left_out = {*missing, *(key for key in values if key not in dtypes)}
        for name, key in list(self._names.items()):
            if key not in left_out:
                continue
            array = self._arrays.get(name)
            tied = array is not None and any(
                other.data_ptr() == array.data_ptr() and other.shape == array.shape
                for more, other in self._arrays.items()
                if self._names[more] not in left_out
            )
            if self._strict and not tied and key in tables:
                raise KeyNotInitialized(
                    f"{name!r} cannot follow: key {key!r} is a table. Follow its rows with reader.open_table({key!r}), "
                    "and leave it out, or pass strict=False, which leaves such arrays as they are"
                )
            if self._strict and not tied:
                raise KeyNotInitialized(
                    f"{name!r} is not published: no version has key {key!r}. Leave it out, give names=, or pass "
                    "strict=False, which leaves such arrays as they are"
                )
            del self._names[name]
            self._arrays.pop(name, None)
        for name, key in self._names.items():
            if name in self._refused:
                raise self._refused[name]
            shape = tuple(self._arrays[name].shape)
            if shape != values[key].spec.shape:
                raise Mismatch(f"{name!r} has shape {shape}, and key {key!r} has {values[key].spec.shape}")
        published = {
            key: Published(values[key].spec.size, dtypes[key], values[key].segments)
            for key in dict.fromkeys(self._names.values())
        }
        share = None if self._alone else self._source.share
        memory = None if share is None else share(self._store, published)
        self._copy = PublishedCopy(published, memory or CopyMemory(published))
        return self._copy

    def _dtypes(self, values: Sequence[HeldValue], deadline: float) -> dict[Key, str] | None:
        """Return as what each of ``values`` is published that is in any version, by asking for one not there yet.

        None: one of the servers has not yet the first version, which another one has.
        """
        if not values:
            return {}
        asked: dict[int, list[HeldValue]] = {}
        for value in values:
            for segment in value.segments[:1]:
                asked.setdefault(segment.server, []).append(value)
        dtypes: dict[Key, str] = {}
        numbers: list[int] = []

        def take(some: Sequence[HeldValue], reply: wire.VersionRead) -> None:
            numbers.append(reply.number)
            dtypes.update(zip((value.key for value in some), reply.dtypes, strict=False))

        asks = [
            self._question(
                server,
                {"ids": [value.segments[0].id for value in some], "held": [], "want": NEVER},
                partial(take, some),
            )
            for server, some in asked.items()
        ]
        try:
            self._source.ask("follow", [value.key for value in values], asks, deadline)
        except KeyNotInitialized:
            if len(values) == 1:
                return {}
            middle = len(values) // 2
            parts = [self._dtypes(part, deadline) for part in (values[:middle], values[middle:])]
            return None if parts[0] is None or parts[1] is None else parts[0] | parts[1]
        return dtypes if all(numbers) else None

    # ---- what is fetched

    def _question(self, server: int, fields: Mapping[str, Any], take: Callable[[Any], None]) -> Ask:
        return server, wire.ReadVersion, {"store": self._store, "lineage": UNKNOWN, **fields}, take

    def _newest(self, server: int, deadline: float) -> tuple[int, int, str]:
        """Return the newest version on a server: lineage, number, which is 0 if there is none, and label."""
        replies: list[wire.VersionRead] = []
        fields = {"ids": [], "held": [], "want": 0}
        self._source.ask("follow", (), [self._question(server, fields, replies.append)], deadline)
        return replies[-1].lineage, replies[-1].number, replies[-1].label

    def _wait(self, deadline: float) -> bool:
        """Wait for another version on one of the servers; return whether there is one. It costs two small messages."""
        if self._copy is None or self._torn or not self._copy.servers:
            return True
        fields = {"ids": [], "lineage": self._lineage, "held": [self.version], "want": 0, "newer": True}
        with suppress(DeadlineExceeded):
            question = self._question(self._copy.servers[0], fields, _ignore)
            self._source.ask("wait_newer", list(self._copy.arrays), [question], deadline)
            return True
        return False

    def _update(self, deadline: float) -> bool:
        try:
            changed = self._updated(deadline)
        except UsageError:
            # Where keys are may have changed: stores are closed and made. The array of a parameter whose gradients turn
            # out to be sparse is a table from its first step on: then say so, or leave it as it is.
            self._leave()
            known = set(self._keys(deadline))
            values = self._source.find([key for key in self._names.values() if key in known], deadline)
            if not any(isinstance(value.spec, TableSpec) for value in values):
                raise
            changed = self._updated(deadline)
        if changed is not None and self._on_update is not None:
            self._on_update(changed)  # others have the copy meanwhile
        return changed is not None

    def _updated(self, deadline: float) -> list[str] | None:
        """Have the newest version; return the names of what has changed, None if it was there."""
        copy = self._found(deadline)
        if copy is None or not copy.servers:
            return None
        newest = self._newest(copy.servers[0], deadline)
        lineage, number, _ = newest
        if not number:
            return None
        if copy.memory.lineage not in (UNKNOWN, lineage):  # another run: where arrays are may have changed
            self._leave()
            copy = self._found(deadline)
            if copy is None:
                return None
        try:
            return self._changed(copy, newest, deadline)
        except SharingStalled as exc:
            log.warning("%s: this follower has a copy of its own from now on", exc)
            self._leave()
            self._alone = True
            return self._updated(deadline)

    def _changed(self, copy: PublishedCopy, newest: tuple[int, int, str], deadline: float) -> list[str] | None:
        """Have ``newest``, or a later one, in the arrays; return the names of what has changed, None if they had it."""
        with copy.memory.reading(deadline):
            if copy.has(*newest[:2]):
                return self._follow(copy)
        with copy.memory.writing(deadline):
            copy.note(*newest)
            self._fetch(copy, deadline)
            return self._follow(copy)

    def _leave(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.memory.close()

    def close(self) -> None:
        """Give up the copy of what was published. The arrays stay as they are."""
        self._leave()

    def _fetch(self, copy: PublishedCopy, deadline: float) -> None:
        """Have all pieces of one version, the newest that there was at first or later."""
        damaged = 0
        while (first := next(asks := copy.asks(), None)) is not None:
            brought: list[bool] = []
            questions = (
                self._question(ask.server, copy.fields(ask), partial(_take, copy, ask, brought))
                for ask in chain([first], asks)
            )
            try:
                at_once = AT_ONCE * len(copy.servers)
                self._source.ask("update", list(copy.arrays), questions, deadline, at_once, copy.memory.beat)
            except WireError as exc:
                damaged += 1
                if damaged > MOST_DAMAGED:
                    raise
                log.warning("%s: it is fetched again", exc)
            if not any(brought):  # a server does not have the version yet that another one has
                if self._session.now() + LEAST_PAUSE_S >= deadline:
                    raise DeadlineExceeded(f"version {copy.memory.number} is not whole in time: {copy.lacking()}")
                self._session.pause(LEAST_PAUSE_S)
                copy.memory.beat()
        # All is here. A server that did not know would keep this version beside newer ones, and look for changes since.
        memory = copy.memory
        has = {"ids": [], "lineage": memory.lineage, "held": [memory.number], "want": 0}
        for server in copy.servers:
            self._session.tell(server, wire.ReadVersion, {"store": self._store, **has})

    def _follow(self, copy: PublishedCopy) -> list[str] | None:
        """Have the version of the copy in the arrays; return the names of what changed, None if it was there."""
        memory = copy.memory
        if not self._torn and (memory.lineage, memory.number) == (self._lineage, self.version):
            return None
        changed = []
        whole, self._torn = self._torn or self._lineage != memory.lineage, True
        for name, key in self._names.items():
            if copy.arrays[key].write(self._arrays[name], whole):
                changed.append(name)
            memory.beat()
        for array in copy.arrays.values():
            array.written()
        self._lineage, self.version, self.label = memory.lineage, memory.number, memory.label
        self._torn = False
        return changed


def _target(array: Any) -> torch.Tensor:
    tensor = as_output(array)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(
            "a tensor that was made in inference mode cannot be written to outside of it: pass its clone()"
        )
    return tensor


def _take(copy: PublishedCopy, ask: VersionAsk, brought: list[bool], reply: wire.VersionRead) -> None:
    brought.append(copy.take(ask, reply))


def _ignore(_reply: wire.VersionRead) -> None:
    pass
