"""The file of the job's trace, beside the page or alone: written while the job runs, and once more when it is over."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.job.settings import TRACE, TRACE_FILE
from kvstore.wire import TraceFetched
from servers.tracing.trace_writer import TraceWriter

STEP_S = 0.5  # the scheduler, when all have left it, waits so long for this process
NICE = 19  # so that members never wait for it


class TraceSession(Protocol):
    """What a trace is fetched from; see ``ObserverSession``."""

    def fetch_trace(self, after: int) -> TraceFetched:
        """Return the chunks after number ``after``."""
        ...

    def close(self) -> None:
        """Close the link."""
        ...


class TraceRecording:
    """See the module.

    Args:
        writer: of the file.
        connect: makes a link to the scheduler, of this recording alone.
        over: set when the job is over.
        step_s: the time between two questions to the scheduler.
    """

    def __init__(
        self,
        writer: TraceWriter,
        connect: Callable[[], TraceSession],
        over: threading.Event,
        step_s: float = STEP_S,
    ) -> None:
        self._step_s = step_s
        self._writer = writer
        self._connect = connect
        self._over = over
        self._thread = threading.Thread(target=self.run, name="trace", daemon=True)

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], connect: Callable[[], TraceSession], lifeline: Callable[[], threading.Event]
    ) -> TraceRecording | None:
        """Return the recording that the environment asks for; None if it asks for none.

        Args:
            lifeline: returns what is set when the job is over.
        """
        file = TRACE_FILE.read(env)
        if not file:
            return None
        return cls(TraceWriter(Path(file), str(TRACE.read(env))), connect, lifeline())

    def start(self) -> None:
        """Record in a thread of its own."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the file has been written for the last time."""
        self._thread.join()

    def run(self) -> None:
        """Record until the job is over."""
        with contextlib.suppress(OSError):  # on Linux it is this thread's niceness alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        session: TraceSession | None = None
        while not self._over.wait(self._step_s):  # the scheduler has ended then, if this has all that it had
            try:
                session = session or self._connect()
                self._writer.step(session)
            except KVStoreError:  # the scheduler is busy, or is started again, or the job is over
                if session is not None:
                    session.close()
                    session = None
        self._writer.finish()
        if session is not None:
            session.close()
