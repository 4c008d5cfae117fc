"""The file with the scheduler's log; see ``servers.scheduler.logged``.

It is in the job's private directory. It holds public keys and what members say, but no secrets. Nothing is synced to
the disk: the scheduler is killed, not the machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import KVStoreError
from servers.scheduler.logged import LiveRecords, Record, RecordPacker, beginning, unpack

log = logging.getLogger(__name__)

TRIM_BYTES = 1 << 18  # a log that has grown by so much, and to twice its length, is trimmed


class InputLog:
    """The log of a scheduler, which takes up where the one before it was killed.

    Args:
        path: the file. Where there is none, this is the job's first scheduler.
        shape: see ``beginning``; its first number is that of the workers.

    Attributes:
        earlier: what is in the log already; empty if this is the first scheduler.

    Raises:
        KVStoreError: the log cannot be read or written, is another job's, is damaged, or was given up.
    """

    def __init__(self, path: Path, *shape: int) -> None:
        self._path = path
        self._begins = beginning(*shape)
        self._packer = RecordPacker()
        self._live = LiveRecords(shape[0])
        self._file = -1
        self._length = self._trim_at = 0
        try:
            self.earlier = list(self._read())
            self._begin()
        except OSError as exc:
            raise KVStoreError(f"the scheduler's log, {path}: {exc.strerror}") from None

    def write(self, record: Record) -> None:
        """Write a record. If that is not possible, give the log up: it must not be replayed without it."""
        if self._file < 0:
            return
        data = self._packer.pack(record)
        self._live.add(data, record)
        try:
            self._append(data)
            if self._length > self._trim_at:
                self._begin()
        except OSError as exc:
            self._give_up(exc)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> Iterator[Record]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        if not data:
            raise KVStoreError(
                "the scheduler was started again, but the one before could not write its log to the end (it has said "
                "why), so nobody knows where the job was"
            )
        for record, packed in unpack(data, self._begins, self._packer):
            self._live.add(packed, record)
            if record is not None:
                yield record

    def _begin(self) -> None:
        """Write the log anew, without the records that are not needed any more, and go on behind them."""
        content = self._begins + self._live.trim()
        draft = self._path.with_name(f"{self._path.name}.part")
        new = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        before, self._file, self._length = self._file, new, 0
        if before >= 0:
            os.close(before)
        self._append(content)
        draft.replace(self._path)
        self._trim_at = self._length + max(self._length, TRIM_BYTES)

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._length += len(data)

    def _give_up(self, exc: OSError) -> None:
        log.error(
            "the scheduler's log, %s, cannot be written: %s. The job goes on, but will end if the scheduler dies",
            self._path,
            exc.strerror,
        )
        self.close()
        os.truncate(self._path, 0)
