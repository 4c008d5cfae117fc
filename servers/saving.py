"""Writes what a server has captured to its file of a checkpoint, in a thread beside the service."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.checkpoint.folders import folder_of
from kvstore.checkpoint.tensors import write_tensors
from kvstore.errors import CheckpointError
from kvstore.manifests import FileRecord
from servers.store.capture import CaptureMemory, StoreCapture

log = logging.getLogger(__name__)

NICENESS = 10  # of the thread while it writes: training goes first


class Saver:
    """Writes the captures of one server.

    Args:
        memory: of the captures.
        directory: of all checkpoints of the job.
        rank: the server's.
        done: called in the thread with a capture, the path of its file, and that file or the error.
        thread: makes threads, with the arguments of ``threading.Thread``.
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
        wanted = capture.drop()
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
