"""A process's membership in a job: it joins, beats while it is there, and leaves in order.

Workers and servers are members alike. A worker process has one session, whatever number of stores it makes, so that
it has one rank; ``shared`` keeps it until the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from kvstore.address import host_and_port, resolve
from kvstore.bootstrap import joining
from kvstore.config import Config
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost, rebuild
from kvstore.keys import split_key
from kvstore.member.client import Client, Me
from kvstore.member.heartbeat import Heartbeat
from kvstore.ticket import Ticket
from kvstore.transport import Transport
from kvstore.wire import MAX_REASON, Census, Fault, JobFailed, Join, Leave, Message, Node, Welcome

log = logging.getLogger(__name__)

LEAVE_S = 5.0  # how long the scheduler may take to let a member go
AFTER_OTHERS_S = 2.0  # a launcher takes the first process to end for the one that failed: let that be it
EXIT_GRACE_S = 2.0  # how long a process that ends waits for pushes nobody waited for


class Session:
    """Membership of this process in a job. Joins on construction.

    Args:
        config: the job, and this process's role in it.
        make_transport: returns a new end for links.
        address: where other members reach this one; empty for workers.
        clock: seconds, monotonic.
        on_notice: takes the scheduler's notices to servers, in the heartbeat's thread.

    Raises:
        DeadlineExceeded: not all members came in time; the message names the missing.
        ConfigError: the scheduler would not have it.
    """

    def __init__(
        self,
        config: Config,
        make_transport: Callable[[], Transport],
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_notice: Callable[[Message], None] | None = None,
    ) -> None:
        self.config = config
        self._on_notice = on_notice
        self._faults: dict[int, list[KVStoreError]] = {}
        self._stores = 0
        self._left = False
        self.flushes: list[Callable[[float], None]] = []
        self.client = Client(
            make_transport(), clock, config.timeout_s, config.role, secrets.randbits(62), config.window_bytes
        )
        try:
            self.scheduler = self.client.connect(config.root, "the scheduler")
        except BaseException:
            self.client.close()
            raise
        try:
            welcome = self._join(address)
            self.client.node = Node(config.role, welcome.rank, welcome.incarnation)
            self.num_workers = welcome.num_workers
            self.servers = (
                [self.client.connect(there, f"server {rank}", bulk=True) for rank, there in enumerate(welcome.servers)]
                if config.role == "worker"
                else []
            )
        except BaseException as exc:
            self._give_up(f"it gave up joining: {type(exc).__name__}: {exc}"[:MAX_REASON])
            raise
        self._heartbeat = Heartbeat(
            make_transport(),
            config.root,
            self.client.node,
            config.heartbeat_s,
            config.heartbeat_timeout_s,
            clock,
            self._take_notice,
            self.client.fail,
        )
        self._heartbeat.start()

    def _join(self, address: str) -> Welcome:
        """Ask to join, and wait for the others: a worker until its deadline, a server while the scheduler lives."""
        what = f"joining the job at {split_key(self.config.root)[0]}"
        ticket = Ticket(what, (), self.client, timeout_s=self.config.join_timeout_s or None)

        def make(me: Me) -> Join:
            role, _, incarnation, seq, done = me
            return Join(role, self.config.rank_hint, incarnation, seq, done, address=address)

        self.client.ask(self.scheduler, ticket, make, ticket.take)
        while True:
            try:
                welcome: Welcome = ticket.wait()
                return welcome
            except DeadlineExceeded as exc:
                if exc.silent:
                    raise DeadlineExceeded(f"{exc}{self._unresolved()}", exc.silent) from None
                if self.config.role == "worker":
                    raise
                log.warning("%s", exc)

    def _unresolved(self) -> str:
        """What is wrong with the name of the scheduler's host; empty if nothing is."""
        root = split_key(self.config.root)[0]
        try:
            if root.startswith("tcp://"):
                resolve(host_and_port(root)[0])
        except ConfigError as exc:
            return f": {exc}"
        return ""

    def _give_up(self, error: str) -> None:
        """Let the scheduler know, or it would count on this process, and take no other in its place."""
        try:
            with contextlib.suppress(KVStoreError):
                self.client.tell(self.scheduler, lambda me: Leave(*me, error=error))
        finally:
            self.client.close(linger=1.0)

    @property
    def rank(self) -> int:
        """This member's rank within its role."""
        return self.client.node.rank

    def new_store(self) -> int:
        """Return the number of the next store; workers that make their stores in the same order agree on it."""
        self._stores += 1
        return self._stores - 1

    def check(self, store: int) -> None:
        """Raise what has ended the job, or what the scheduler has found wrong with ``store``."""
        self.client.check()
        faults = self._faults.get(store)
        if faults:
            raise faults.pop(0)

    def num_dead_nodes(self) -> int:
        """Return how many members the scheduler has lost."""
        counted = self.client.call(self.scheduler, "asking for the dead", lambda me: Census(*me))
        return int(counted.count)

    def leave(self, error: str | None = None) -> None:
        """Leave the job, in order or because of ``error``, which then is the job's. May be called again."""
        if self._left:
            return
        self._left = True
        text = error if error is None else error[:MAX_REASON]
        try:
            if self.client.failure is None:
                self.client.call(self.scheduler, "leaving the job", lambda me: Leave(*me, error=text), LEAVE_S)
            else:
                self.client.tell(self.scheduler, lambda me: Leave(*me, error=text))
        except KVStoreError as exc:
            log.warning("left the job without the scheduler's answer: %s", exc)
        finally:
            self._heartbeat.stop()
            self.client.close(linger=1.0)

    def _take_notice(self, notice: Message) -> None:
        if isinstance(notice, JobFailed):
            self.client.fail(NodeLost(notice.text))
        elif isinstance(notice, Fault):
            self._faults.setdefault(notice.store, []).append(rebuild(notice.kind, notice.text))
        if self._on_notice is not None:
            self._on_notice(notice)


_FORKED = "this process was forked from a member of the job; create and use stores in the parent only"
_lock = threading.Lock()
_shared: tuple[int, Session] | None = None


def shared(config: Config) -> Session:
    """Return this process's session as a worker, joining the job (see ``bootstrap``) the first time.

    Raises:
        ConfigError: the environment describes no job, or this process was forked from a member.
    """
    global _shared
    with _lock:
        if _shared is not None:
            if _shared[0] != os.getpid():
                raise ConfigError(_FORKED)
            return _shared[1]
        from kvstore.transport.links import links
        from kvstore.transport.shm import sharing

        with joining(config) as config:
            config.require_job("worker")
            session = Session(config, sharing(links(config), config))
        _shared = (os.getpid(), session)
        atexit.register(_leave_at_exit)
        return session


def _after_fork() -> None:
    """Fail whatever the child calls: servers would take its requests for its parent's, and the parent's for repeats."""
    if _shared is not None:
        _shared[1].client.failure = ConfigError(_FORKED)


os.register_at_fork(after_in_child=_after_fork)


def _leave_at_exit() -> None:
    """Leave in order; if the script died of an exception, say so to the job instead of letting it wait."""
    if _shared is None or _shared[0] != os.getpid():
        return
    session = _shared[1]
    try:
        _say_farewell(session)
    except KeyboardInterrupt:  # Python would show it, go on, and end with 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(KVStoreError):
            session.leave("KeyboardInterrupt")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be closed, or none
                stream.flush()
        os.kill(os.getpid(), signal.SIGINT)


def _say_farewell(session: Session) -> None:
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # in a shell, errors are not the end
    text = None if error is None else "".join(traceback.format_exception_only(error)).strip()
    if text is None:
        for flush in session.flushes:
            try:
                flush(EXIT_GRACE_S)
            except DeadlineExceeded:
                pass  # the servers have these pushes; whoever they wait for need not be waited for here
            except KVStoreError as exc:
                text = f"{type(exc).__name__}: {exc}"
                print(f"kvstore: at exit: {text}", file=sys.stderr)
    with contextlib.suppress(KVStoreError):
        session.leave(text)
    if session.client.failure is not None:
        time.sleep(AFTER_OTHERS_S)
