"""A server's part of a checkpoint: worker 0's requests, and the thread that writes the captures to a file.

``CheckpointRequests`` does no I/O: it is part of the shard. ``Saver`` writes, beside the service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvstore import wire
from kvstore.checkpoint.folders import folder_of
from kvstore.checkpoint.tensors import write_tensors
from kvstore.errors import CheckpointError, KVStoreError, UsageError
from kvstore.sealed_folders import FileRecord
from servers.requests.replies import Answer, refuse
from servers.store.capture import CaptureMemory, StoreCapture
from servers.store.open_stores import ServedStores

log = logging.getLogger(__name__)

NICENESS = 10  # of the thread while it writes: training goes first
MOST = 4  # checkpoints whose outcome is remembered
MOST_ASKERS = 16  # of one checkpoint: worker 0 over its links


class _Asker(NamedTuple):
    peer: bytes
    request: wire.AwaitCapture


class CheckpointRequests:
    """The captures of one server: those under way, the outcomes of others, and the requests that wait for them.

    A capture is known by the numbers of its store and of its checkpoint.

    Attributes:
        save: writes a capture to its file, then has ``saved`` called; None if this server has no place for checkpoints.
        memory: what captures are copied to.
    """

    def __init__(self, rank: int, stores: ServedStores) -> None:
        self.save: Callable[[StoreCapture], None] | None = None
        self.memory = CaptureMemory()
        self._rank = rank
        self._stores = stores
        self._under_way: set[tuple[int, int]] = set()
        self._outcomes: dict[tuple[int, int], wire.Captured | KVStoreError] = {}
        self._waiting: dict[tuple[int, int], list[_Asker]] = {}

    @property
    def nbytes(self) -> int:
        """How many bytes a checkpoint of all stores copies."""
        return sum(served.captures.nbytes for served in self._stores.open.values())

    def serve(self, peer: bytes, message: wire.Capture | wire.AwaitCapture) -> list[Answer]:
        """Begin a capture, or let worker 0 wait for its file; return the answers that need not wait."""
        if message.node.role != "worker" or (message.node.rank != 0 and not self._stores.elastic):
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        if isinstance(message, wire.AwaitCapture):
            return self._wait(peer, message)
        served = self._stores.require(message.store)
        if self.save is None:
            raise CheckpointError(
                f"server {self._rank} has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all processes "
                "of the job (launch.py --checkpoint-dir)"
            )
        which = message.store, message.number
        if which in self._under_way or which in self._outcomes:
            raise UsageError(f"checkpoint {message.number} of store {message.store} has been asked for before")
        self._under_way.add(which)  # before it begins: it may end at once
        try:
            clocks = dict(zip(message.ids, message.clocks, strict=True))
            served.captures.begin(message.store, message.number, clocks, self.save, self.memory)
        except BaseException:
            self._under_way.discard(which)
            raise
        return [Answer(peer, message, wire.Ack(message.seq))]

    def saved(self, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> list[Answer]:
        """Note that ``capture`` was written to ``path``, or why not; return the answers to waiting requests."""
        if capture.store in self._stores.open:
            self._stores.open[capture.store].captures.end(capture)
        noted: wire.Captured | KVStoreError = (
            outcome
            if isinstance(outcome, CheckpointError)
            else wire.Captured(
                0,  # each answer has the number of its request
                outcome.nbytes,
                outcome.sha256,
                [capture.clocks[number] for number in capture.ids],
                capture.optimizer,
                str(path),
            )
        )
        which = capture.store, capture.number
        self._under_way.discard(which)
        self._outcomes[which] = noted
        while len(self._outcomes) > MOST:
            del self._outcomes[next(iter(self._outcomes))]
        return [self._answer(*asker, noted) for asker in self._waiting.pop(which, ())]

    def explain(self, node: wire.Node, about: int) -> str:
        """Say what request ``about`` of ``node`` waits for; empty if it does not wait."""
        for (_, number), askers in self._waiting.items():
            if any(asker.request.node == node and asker.request.seq == about for asker in askers):
                return f"is writing checkpoint {number}"
        return ""

    def _wait(self, peer: bytes, request: wire.AwaitCapture) -> list[Answer]:
        """Answer ``request`` now, or when its capture has ended; a repeat is answered over its link, too."""
        which = request.store, request.number
        if which in self._under_way:
            askers = self._waiting.setdefault(which, [])
            if (peer, request) not in askers:
                askers.append(_Asker(peer, request))
                del askers[:-MOST_ASKERS]
            return []
        outcome = self._outcomes.get(which)
        if outcome is None:
            outcome = UsageError(f"checkpoint {request.number} is not known here: this server has taken over since")
        return [self._answer(peer, request, outcome)]

    def _answer(self, peer: bytes, request: wire.Request, outcome: wire.Captured | KVStoreError) -> Answer:
        if isinstance(outcome, KVStoreError):
            return refuse(peer, request, outcome)
        return Answer(peer, request, replace(outcome, seq=request.seq))


class Saver:
    """Writes the captures of one server.

    ``done`` is called in the thread with a capture, the path of its file, and that file or the error.
    """

    def __init__(
        self,
        memory: CaptureMemory,
        directory: Path,
        rank: int,
        done: Callable[[StoreCapture, Path, FileRecord | CheckpointError], None],
        thread: Callable[..., threading.Thread] = threading.Thread,
    ) -> None:
        self._memory = memory
        self._directory = directory
        self._rank = rank
        self._done = done
        self._thread = thread

    def save(self, capture: StoreCapture) -> None:
        """Begin to write ``capture``, which is complete. Never raises: a server's rounds do not depend on it."""
        name = f"kvstore-checkpoint-{capture.number}"
        try:
            self._thread(target=self._save, args=(capture,), name=name, daemon=True).start()
        except RuntimeError as exc:  # the system has no threads left
            error = CheckpointError(f"checkpoint {capture.number} failed: server {self._rank}: {exc}")
            self._done(capture, self._path(capture), error)

    def prepare(self, nbytes: int) -> None:
        """Begin to have memory for captures of so many bytes, long before the first: see ``CaptureMemory``."""
        with contextlib.suppress(RuntimeError):
            self._thread(target=self._prepare, args=(nbytes,), name="kvstore-checkpoint-memory", daemon=True).start()

    def _prepare(self, nbytes: int) -> None:
        _yield_to_others()
        with contextlib.suppress(MemoryError):  # then captures do with new memory, or say that there is none
            self._memory.reserve(nbytes)

    def _path(self, capture: StoreCapture) -> Path:
        return folder_of(self._directory, capture.number) / f"store-{capture.store}.server-{self._rank}.safetensors"

    def _save(self, capture: StoreCapture) -> None:
        outcome = self._written(capture)
        if isinstance(outcome, CheckpointError):
            log.error("%s", outcome)
        wanted = capture.drop()  # before worker 0 is answered: it may ask for the next capture at once
        self._done(capture, self._path(capture), outcome)
        self._prepare(wanted)

    def _written(self, capture: StoreCapture) -> FileRecord | CheckpointError:
        path = self._path(capture)
        if capture.doubt is not None:
            return CheckpointError(f"checkpoint {capture.number} failed: server {self._rank}: {capture.doubt}")
        try:
            capture.copy()
            _yield_to_others()
            metadata = {"checkpoint": str(capture.number), "store": str(capture.store), "server": str(self._rank)}
            return write_tensors(path, capture.headers, capture.contents(), metadata)
        except FileNotFoundError:
            host = socket.gethostname()
            return CheckpointError(
                f"checkpoint {capture.number}: server {self._rank} on {host} has no folder {path.parent}, which worker "
                "0 has made: the directory of checkpoints must be on a file system that all hosts share"
            )
        except (OSError, MemoryError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not enough memory"
            return CheckpointError(f"checkpoint {capture.number} failed: server {self._rank}: {path}: {reason}")


def _yield_to_others() -> None:
    """Let all other threads of the machine go before this one."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
