"""The file of the job's trace, beside the page or alone: written while the job runs, and once more at the end.

Under launch.py, members know the rounds from their start, and the job is over when this process's standard input ends.
Elsewhere this process tells members which rounds to note. When these are over, the file is complete, and another trace
may begin.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvstore import wire
from kvstore.errors import ConfigError, KVStoreError, UsageError
from kvstore.job.settings import TRACE, TRACE_FILE
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import UNCHANGED, ObserverSession
from kvstore.observing.view import JobView, MemberView, Span
from servers.tracing.trace_writer import TraceWriter

STEP_S = 0.5  # the scheduler, when all have left it, waits so long for this process
LOOK_S = 2.0  # between two looks at whether the rounds are over
NICE = 19  # so that members never wait for it
MISSING_S = 15.0  # without an answer, the job is taken to be over, where nobody says when it is
MOST_TRIES = 5  # if workers hear of rounds too late, others are chosen; after so many times a part of them is enough
REFUSED_S = 7.0  # of another observer that has just gone the scheduler does not know that yet


AHEAD_S = 1.0  # so much before its first round all members know of a trace


def rounds_ahead(view: JobView, wanted: RoundWindow) -> RoundWindow:
    """Return ``wanted``; if its first is 1 and over, as many rounds from now on. ConfigError if others are over."""
    latest = max((span.latest.rounds for _, span in _at_work(view)), default=0)
    if wanted.first > latest or (wanted.first > 1 and wanted.last > latest):
        return wanted
    if wanted.first > 1:
        raise ConfigError(
            f"rounds {wanted} are over: the job is in round {latest}; a number alone, such as FILE:100, takes the next "
            "rounds"
        )
    passed = max(span.rate("rounds") * (AHEAD_S + member.silent_s) for member, span in _at_work(view))
    first = latest + 1 + math.ceil(passed)
    return RoundWindow(first, first + wanted.last - 1)


def are_over(view: JobView, rounds: RoundWindow) -> bool:
    """Whether all workers at work have passed these rounds; False before any has reported."""
    if not any(member.worker is not None for member in view.of_role("worker")):
        return False
    return all(span.latest.rounds > rounds.last for _, span in _at_work(view))


def notes_due_s(view: JobView) -> float:
    """Return after how many seconds what members have noted by now has come: they send it about as often as beats."""
    return 2 * AHEAD_S + 2 * max((member.silent_s for member in view.members if member.state == "ready"), default=0.0)


def _at_work(view: JobView) -> Iterator[tuple[MemberView, Span[wire.WorkerReport]]]:
    for member in view.of_role("worker"):
        if member.state == "ready" and member.worker is not None:
            yield member, member.worker


class TraceRecording:
    """Records one trace. As a context it records in a thread of its own until the end of the block.

    Args:
        writer: of the file, with the rounds that are wanted.
        connect: makes a link to the scheduler, of this recording alone.
        over: set when the job is over; None where nobody says so, and members do not note anything yet.
        step_s: the time between two questions to the scheduler.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        writer: TraceWriter,
        connect: Callable[[], ObserverSession],
        over: threading.Event | None,
        step_s: float = STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step_s = step_s
        self._writer = writer
        self._wanted = writer.rounds
        self._connect = connect
        self._begins = over is None
        self._over = over or threading.Event()
        self._clock = clock
        self._asked = UNCHANGED  # what members are to note
        self._complete_at = math.inf
        self._looked = -math.inf
        self._tries = 0
        self._session: ObserverSession | None = None
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self.failure: KVStoreError | None = None

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], connect: Callable[[], ObserverSession], over: threading.Event | None
    ) -> TraceRecording | None:
        """None if the environment asks for none."""
        file = TRACE_FILE.read(env)
        return cls(TraceWriter(Path(file), TRACE.read(env)), connect, over) if file else None

    def __enter__(self) -> TraceRecording:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def run(self) -> None:
        """Record until the job is over, or the rounds are; KVStoreError if there is no trace."""
        with contextlib.suppress(OSError):  # on Linux it is this thread's niceness alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self._record()
        finally:
            self._end()

    def _run(self) -> None:
        try:
            self.run()
        except KVStoreError as error:
            self.failure = error
            print(f"trace: {error}", file=sys.stderr, flush=True)

    def _record(self) -> None:
        began = answered = self._clock()
        while not self._over.wait(self._step_s):  # the scheduler has ended then, if this has all that it had
            try:
                self._session = self._session or self._connect()
                self._step(self._session)
                answered = self._clock()
            except ConfigError:
                raise
            except KVStoreError as error:  # the scheduler is busy, or is started again, or the job is over
                refused = isinstance(error, UsageError)
                patience_s = REFUSED_S if refused else MISSING_S
                if self._begins and self._clock() - answered >= patience_s:
                    if refused or answered == began:
                        raise
                    return
                self._close()
            if self._clock() >= self._complete_at:
                if not self._begins or self._wanted.first > 1 or self._has_enough():
                    return
                self._asked, self._complete_at = UNCHANGED, math.inf  # workers heard of these rounds too late
                self._writer.notes.forget()

    def _step(self, session: ObserverSession) -> None:
        """Fetch what there is. See which rounds there are to be, or whether they are over."""
        if not self._begins or self._asked != UNCHANGED:
            self._look_whether_over(session)  # first: when all has been fetched, the scheduler may end
            self._writer.step(session, self._asked)
            return
        view = session.look()
        rounds = rounds_ahead(view, self._wanted)
        self._writer.step(session, rounds)
        self._asked = self._writer.rounds = rounds
        print(f"trace: rounds {rounds}, to {self._writer.path}; Ctrl-C ends it", file=sys.stderr, flush=True)

    def _has_enough(self) -> bool:
        """Return whether all rounds were noted; after a few tries, whether some were."""
        self._tries += 1
        notes = self._writer.notes
        return notes.all_have(self._asked.first) or (self._tries >= MOST_TRIES and notes.has_round_of(self._asked))

    def _look_whether_over(self, session: ObserverSession) -> None:
        """Note when the trace will be complete, if its rounds are over."""
        now = self._clock()
        if self._complete_at < math.inf or now - self._looked < LOOK_S:
            return
        self._looked = now
        view = session.look()
        if are_over(view, self._writer.rounds):
            self._complete_at = now + notes_due_s(view)

    def _end(self) -> None:
        """Write the file for the last time; members note no more."""
        if self._session is not None and self._asked != UNCHANGED:  # what is noted already is still to come
            first = self._asked.first
            with contextlib.suppress(KVStoreError):
                self._writer.step(self._session, RoundWindow(first, first))
        self._writer.finish()
        if self._asked != UNCHANGED:
            count = self._writer.notes.count
            print(f"trace: {self._writer.path} has {count} records", file=sys.stderr, flush=True)
        self._close()

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
