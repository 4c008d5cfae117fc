"""Fetches what members have noted from the scheduler, and writes the file of the trace: now and then, and at the end.

The file is replaced whole, so it is valid whenever this process is killed. To write a record takes a hundred times as
much processor time as a member needs to note it, and the job waits for processors. So the more records there are, the
longer is the time between two writings. The file is complete when the rounds, or the job, are over.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import WireError
from kvstore.job.files import replacing
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import UNCHANGED, ObserverSession
from kvstore.rare_log import Drops
from servers.tracing.chrome import ChromeTrace
from servers.tracing.collected import CollectedNotes

log = logging.getLogger(__name__)

LEAST_S = 5.0  # between two writings
RECORD_S = 40e-6  # processor time that a record takes, each time that it is written
SHARE = 1 / 400  # of a processor, that the writings may take while rounds are noted
MOST_S = 300.0  # between two writings, whatever they take


class TraceWriter:
    """Fetches and writes one trace. One thread at a time may use it."""

    def __init__(
        self, path: Path, rounds: RoundWindow = UNCHANGED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.rounds = rounds
        self._clock = clock
        self.notes = CollectedNotes()
        self._written = -1  # how many records the file has
        self._written_at = clock()
        self._drops = Drops(log)

    def step(self, source: ObserverSession, ask: RoundWindow = UNCHANGED) -> None:
        """Fetch what is new; write the file if it is time for that. Call it about once a second.

        ``ask`` is what members are to note from now on; ``UNCHANGED`` for what they note already. If the scheduler does
        not answer, or has no trace, it raises ``KVStoreError``: call it again, or ``finish``.
        """
        self._fetch(source, ask)
        if self.notes.count > self._written and self._clock() >= self._due:
            self._write()

    @property
    def _due(self) -> float:
        if self._written < 0 and not self.notes.count:
            return self._written_at  # an empty trace says which rounds there will be
        return self._written_at + min(MOST_S, max(LEAST_S, self.notes.count * RECORD_S / SHARE))

    def finish(self) -> None:
        """Write the file for the last time: the job has ended. Without any record there is a file, too."""
        self._write()

    def _fetch(self, source: ObserverSession, ask: RoundWindow) -> None:
        while True:
            fetched = source.fetch_trace(self.notes.after, ask)
            try:
                if not self.notes.take(fetched):  # asking once more has told that all have come
                    return
            except WireError as exc:
                self._drops.note("an answer about the trace", exc)
                return

    def _write(self) -> None:
        self._written = self.notes.count
        try:
            write_trace(self.path, ChromeTrace(self.notes, str(self.rounds)))
        except OSError as exc:
            self._drops.note("the trace", f"{self.path} cannot be written: {exc.strerror}")
        self._written_at = self._clock()


def write_trace(path: Path, trace: ChromeTrace) -> None:
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    with replacing(path, durable=False) as draft, draft.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{encode(trace.about)},"traceEvents":[')
        comma = "\n"
        for event in trace.events():
            file.write(comma)
            file.write(encode(event))
            comma = ",\n"
        file.write("\n]}\n")
