"""The session that all stores of a worker process share, so that it has one rank. It ends with the process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time

from kvstore.bootstrap import joining
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError
from kvstore.job import tracebacks
from kvstore.job.config import Config
from kvstore.job.exit_report import note_joined, require_own
from kvstore.job.processes import entitle
from kvstore.job.tracebacks import described
from kvstore.member.pulse import available
from kvstore.member.session import Session

AFTER_OTHERS_S = 2.0  # launchers blame the first process to end, so the one that failed has to end first
EXIT_GRACE_S = 2.0  # how long a process that ends waits for its outstanding pushes
_FORKED = "this process was forked from a member of the job: create and use stores in the parent only"


class SharedSession:
    """Joins the job when the session is first asked for, and leaves it when the process ends."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._pid = 0  # of the process that has joined
        # While an exception has interrupted joining: what undoes the preparations for it, and the session.
        self._joining: tuple[contextlib.AbstractContextManager[Config], Session] | None = None
        self._lock = threading.RLock()  # an exception may leave it locked; the same thread can take it again

    def get(self, config: Config) -> Session:
        """Return the session, joining the job the first time; ``ConfigError`` says why this process cannot."""
        with self._lock:
            if self.session is not None:
                if self._pid != os.getpid():
                    raise ConfigError(_FORKED)
                return self.session
            rank = _rank(config)  # before ``joining``, whose Config is that of the job which it has made
            if self._joining is None:
                place: contextlib.AbstractContextManager[Config] = joining(config)
                config = place.__enter__()
                try:
                    self._joining = place, _new(config)
                except Exception as exc:
                    place.__exit__(type(exc), exc, exc.__traceback__)
                    raise
                atexit.register(self.leave_at_exit)
            place, session = self._joining
            try:
                session.join()
            except Exception as exc:
                self._joining = None
                place.__exit__(type(exc), exc, exc.__traceback__)
                raise
            place.__exit__(None, None, None)
            self._pid, self.session, self._joining = os.getpid(), session, None
            note_joined(os.environ, rank)
            entitle("worker", session.rank)
            return session

    def fail_after_fork(self) -> None:
        """Let every call in a child fail: servers would take its requests for its parent's, and those for repeats."""
        if self.session is not None:
            self.session.client.failure = ConfigError(_FORKED)

    def leave_at_exit(self) -> None:
        """Leave in order. If the script died of an exception, tell the job instead of letting it wait."""
        if self._joining is not None:
            place, session = self._joining
            session.give_up("it ended before it had joined")
            place.__exit__(SystemExit, SystemExit(), None)
        if self.session is None or self._pid != os.getpid():
            return
        try:
            _say_farewell(self.session)
        except KeyboardInterrupt:  # Python would print it, go on, and exit with 0
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(KVStoreError):
                self.session.leave("KeyboardInterrupt")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it may be closed, or none
                    stream.flush()
            os.kill(os.getpid(), signal.SIGINT)


_here = SharedSession()
os.register_at_fork(after_in_child=_here.fail_after_fork)


def shared(config: Config) -> Session:
    if _here.session is None:
        _require_worker(config)
    return _here.get(config)


def joined() -> Session | None:
    return _here.session


def _require_worker(config: Config) -> None:
    """Raise ``ConfigError`` if this process cannot be a worker; else have its uncaught exceptions reported.

    A process that ``multiprocessing`` has started by spawn or forkserver first runs the parent's script, as a module.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            'this script makes a distributed store outside of the guard if __name__ == "__main__". This process was '
            "started by multiprocessing (by spawn or forkserver), for a DataLoader perhaps, and runs the script once "
            'more. Put what the script does, except for imports and definitions, below if __name__ == "__main__":'
        )
    number = config.rank_hint if config.ranks is None else config.ranks.rank
    require_own(os.environ, f"worker {number}" if number >= 0 else "this worker", _rank(config))
    tracebacks.install_excepthook()


def _rank(config: Config) -> str:
    """Return what tells this rank from other jobs' ranks; empty if launch.py has started it."""
    ranks = config.ranks
    return "" if ranks is None else f"{ranks.rank} of {ranks.size} at {ranks.master}:{ranks.port}"


def _new(config: Config) -> Session:
    from kvstore.transport.choose import links
    from kvstore.transport.shm.shared_memory import sharing

    config.require_job("worker")
    return Session(config, sharing(links(config), config), pulse=config.pulse and available())


def _say_farewell(session: Session) -> None:
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a shell goes on after errors
    text = None if error is None else described(error)
    if text is None:
        for flush in session.flushes:
            try:
                flush(EXIT_GRACE_S)
            except DeadlineExceeded:
                pass  # the servers have these pushes; other workers are late, and this one need not wait
            except KVStoreError as exc:
                text = f"{type(exc).__name__}: {exc}"
                print(f"kvstore: at exit: {text}", file=sys.stderr)
    with contextlib.suppress(KVStoreError):
        session.leave(text)
    if session.client.failure is not None:
        time.sleep(AFTER_OTHERS_S)
