"""One checkpoint at worker 0, from the servers' captures to the manifest."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore import wire
from kvstore.checkpoint.folders import part_of, promise_of, prune, remove, settle
from kvstore.checkpoint.manifest import Manifest, StoredSegment, StoredStore, save_manifest
from kvstore.client.entries import Entries
from kvstore.errors import CheckpointError, KVStoreError
from kvstore.member.outstanding import Question, ready
from kvstore.member.session import Session
from kvstore.sealed_folders import FileRecord, record_of
from kvstore.ticket import Operation

log = logging.getLogger(__name__)

POLL_S = 0.02


@dataclass(frozen=True)
class SavedStore:
    """What a checkpoint needs to know of a store."""

    number: int  # on the wire
    ordinal: int  # it is the n-th store that each worker has made
    mode: str  # of its rule
    entries: Entries  # its keys, and where they are
    clocks: Sequence[int]  # by place: how often worker 0 has pushed each key

    def captures(self) -> dict[int, tuple[list[int], list[int]]]:
        by_server: dict[int, tuple[list[int], list[int]]] = {}
        for entry in self.entries.values():
            for segment in entry.segments:
                ids, clocks = by_server.setdefault(segment.server, ([], []))
                ids.append(segment.id)
                clocks.append(self.clocks[entry.place])
        return by_server


class CheckpointInProgress:
    """One checkpoint, until its manifest is written. What goes wrong is logged and counted; training goes on.

    Args:
        folder: of the checkpoint, made already.
        number, rounds, num_workers, num_servers: see ``Manifest``.
        stores: what is saved.
        parts: the ranks of the workers that add something of their own.
        keep: how many checkpoints are kept.
        timeout_s: how long the workers' parts may take.
        ended: called, in a thread, with whether there is a checkpoint now.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        rounds: int,
        num_workers: int,
        num_servers: int,
        stores: Sequence[SavedStore],
        parts: Collection[int],
        keep: int,
        timeout_s: float,
        ended: Callable[[bool], None],
    ) -> None:
        self.number = number
        self.failed = False  # whether it has been given up
        self._folder, self._rounds = folder, rounds
        self._num_workers, self._num_servers = num_workers, num_servers
        self._stores, self._parts = stores, sorted(parts)
        self._keep, self._timeout_s, self._ended = keep, timeout_s, ended
        self._captured: dict[tuple[int, int], wire.Captured] = {}  # by place of the store, and server
        self.expected = [(place, server) for place, store in enumerate(stores) for server in store.captures()]
        self._thread: threading.Thread | None = None
        self._begun = threading.Lock()

    @property
    def open(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    def take(self, which: tuple[int, int], reply: wire.Captured) -> None:
        """Note that a server's file is on the disk. May be called twice."""
        self._captured[which] = reply
        if len(self._captured) == len(self.expected):
            self._end(self._complete)

    def fail(self, error: KVStoreError) -> None:
        """Give up the checkpoint. May be called again."""
        self._end(partial(self._give_up, error))

    def join(self, timeout: float | None) -> bool:
        """Wait until it has ended, once all servers have answered; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.open

    def _end(self, how: Callable[[], None]) -> None:
        # An answer and an error may come in two threads at once. The first ends the checkpoint, for good: the lock is
        # never released.
        if not self._begun.acquire(blocking=False):
            return
        # In a thread of its own: it waits for the files of other workers, and the caller is a push that trains on.
        self._thread = threading.Thread(target=how, name=f"kvstore-checkpoint-{self.number}", daemon=True)
        self._thread.start()

    def _complete(self) -> None:
        try:
            manifest = self._manifest()
            settle(self._folder)
            save_manifest(self._folder, manifest)
        except (CheckpointError, OSError) as exc:
            self._give_up(exc)
            return
        log.info("checkpoint %d after %d rounds: %s", self.number, self._rounds, self._folder)
        self._ended(True)
        try:
            prune(self._folder.parent, self._keep, self.number)
        except (CheckpointError, OSError) as exc:
            log.warning("old checkpoints could not be removed: %s", exc)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        log.error("there is no checkpoint %d, and training goes on: %s", self.number, error)
        try:
            remove(self._folder)
        except OSError as exc:
            log.warning("%s could not be removed: %s", self._folder, exc)
        self._ended(False)

    def _manifest(self) -> Manifest:
        files: list[FileRecord] = []
        stores = []
        for place, store in enumerate(self._stores):
            captures = store.captures()
            file_of: dict[int, int] = {}
            clock_of: dict[int, int] = {}
            for server, (ids, _) in captures.items():
                captured = self._captured[place, server]
                file_of[server] = len(files)
                files.append(self._seen(f"store-{store.number}.server-{server}.safetensors", server, captured))
                if len(captured.clocks) != len(ids):
                    raise CheckpointError(f"server {server} has captured other segments than those asked for")
                clock_of |= dict(zip(ids, captured.clocks, strict=True))
            optimizers = {self._captured[place, server].optimizer for server in captures}
            if len(optimizers) > 1:
                raise CheckpointError("the optimizer was changed in the middle of the checkpoint")
            segments = [
                StoredSegment(part.id, key, part.start, part.stop, clock_of[part.id], file_of[part.server])
                for key, entry in store.entries.items()
                for part in entry.segments
            ]
            specs = {key: entry.spec for key, entry in store.entries.items()}
            stores.append(StoredStore(store.ordinal, store.mode, next(iter(optimizers), None), specs, segments))
        parts = {}
        for rank in self._parts:
            parts[rank] = len(files)
            files.append(record_of(self._arrived(rank)))
        written = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Manifest(self.number, self._rounds, self._num_workers, self._num_servers, written, stores, files, parts)

    def _seen(self, name: str, server: int, captured: wire.Captured) -> FileRecord:
        """Return a server's file, which must be in this process's directory, too."""
        path = self._folder / name
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size != captured.nbytes:
            raise CheckpointError(
                f"server {server} has written {captured.path}, and worker 0 does not find it at {path}: the directory "
                "of checkpoints must be on a file system that all hosts share"
            )
        return FileRecord(name, captured.nbytes, captured.sha256)

    def _arrived(self, rank: int) -> Path:
        """Wait for a worker's file; it is put in place when it is whole."""
        path, promise = part_of(self._folder, rank), promise_of(self._folder, rank)
        deadline = time.monotonic() + self._timeout_s
        while not path.exists():
            if not promise.exists():
                raise CheckpointError(f"worker {rank} could not write {path}; a line of that worker says why")
            if time.monotonic() > deadline:
                raise CheckpointError(f"{path} did not come within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        promise.unlink(missing_ok=True)
        return path


class Answers(Operation):
    """The wait for the files of all servers. An error gives the checkpoint up, and is nobody else's."""

    def __init__(self, saving: CheckpointInProgress, session: Session) -> None:
        super().__init__(f"checkpoint {saving.number}", (), session.client, limits=session.limits)
        self.saving = saving

    def fail(self, error: KVStoreError) -> None:
        self.saving.fail(error)
        super().fail(error)


def ask(session: Session, saving: CheckpointInProgress, stores: Sequence[SavedStore]) -> Answers:
    """Have all servers capture ``stores``, and return when they have noted it; their files come later."""
    answers = Answers(saving, session)
    asked = Operation("asking for a checkpoint", (), session.client, limits=session.limits)
    questions = [
        Question(
            session.servers[server],
            asked,
            wire.Capture,
            {"store": store.number, "number": saving.number, "ids": ids, "clocks": clocks},
        )
        for store in stores
        for server, (ids, clocks) in store.captures().items()
    ]
    session.client.exchange(asked, ready, questions)
    waits = [
        Question(
            session.servers[server],
            answers,
            wire.AwaitCapture,
            {"store": stores[place].number, "number": saving.number},
            partial(saving.take, (place, server)),
        )
        for place, server in saving.expected
    ]
    session.client.submit(answers, ready, waits)
    return answers
