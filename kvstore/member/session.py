"""A process's membership in a job: it joins, sends heartbeats while it is a member, and leaves.

Workers, servers and aggregators have sessions alike. A worker process has one session for all its stores
(``shared_session.py``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from kvstore import wire
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost, rebuild
from kvstore.job.address import host_and_port, resolve
from kvstore.job.config import Config
from kvstore.job.contract import process_name
from kvstore.job.curve_keys import split_key
from kvstore.job.processes import host_name
from kvstore.job.valid_values import RoundWindow
from kvstore.member.activity import WorkerActivity
from kvstore.member.client import Client
from kvstore.member.heartbeat import Heartbeat, Listener
from kvstore.member.outstanding import PendingRequest, ready
from kvstore.member.pulse import PulseProcess
from kvstore.member.window import WindowSize
from kvstore.ticket import Operation, WaitLimits
from kvstore.tracer import Tracer
from kvstore.transport import Peer, Transport
from kvstore.transport.memory import LOOK_S

log = logging.getLogger(__name__)

LEAVE_S = 5.0  # how long the scheduler may take to let a member go


class Session:
    """Membership of this process in a job, from ``join`` to ``leave``.

    Args:
        address: where other members reach this one; empty for workers.
        on_notice: called with the scheduler's notices to servers and aggregators, in the heartbeat's thread; not with
            news of where a server is that are older than others.
        pulse: start a process that sends heartbeats for this one while its interpreter is busy.
        on_line_back: called when links of this process that are not the session's have to be reconnected, in the
            heartbeat's thread.
    """

    def __init__(
        self,
        config: Config,
        make_transport: Callable[[], Transport],
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_notice: Callable[[wire.Message], None] | None = None,
        pulse: bool = False,
        thread: Callable[..., threading.Thread] = threading.Thread,
        on_line_back: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.limits = WaitLimits(config.timeout_s, config.patience_s or math.inf)
        self.stores = 0  # how many this process has made
        self.store_names: dict[int, str] = {}  # of each of them, from 1: the name by which readers find it
        self.flushes: list[Callable[[float], None]] = []  # called before this process leaves
        self.num_workers = 0
        # For servers and aggregators: the public keys that members have proved, by rank, empty on links without keys;
        # and of each aggregator the ranks of the workers that it speaks for.
        self.worker_keys: list[str] = []
        self.aggregator_keys: list[str] = []
        self.aggregated: list[list[int]] = []
        self.addresses: list[str] = []  # of the servers, by rank, as they are now
        self.servers: list[Peer] = []  # of a worker: the links to them
        # of a worker: the link to its host's aggregator, if it has one; None once that is lost
        self.aggregator: Peer | None = None
        self.scheduler: Peer = b""
        self.client = Client(make_transport, clock, self.limits, config.role, secrets.randbits(62), config.window_bytes)
        self.activity = WorkerActivity(self.client, clock, self._carriers)
        self.tracer: Tracer | None = None  # None until there is a trace
        self._traced: list[Callable[[Tracer], None]] = [self.client.trace]
        self._make_transport = make_transport
        self._address = address
        self._clock = clock
        self._on_notice = on_notice
        self._pulse = pulse
        self._thread = thread
        self._on_line_back = on_line_back
        self.takeovers = 0  # how many this member has heard of
        self.lost: frozenset[int] = frozenset()  # the workers without which the job goes on, as this member knows
        self.added: frozenset[int] = frozenset()  # and those that were added to it; some may be lost
        # Whether fewer workers are in than the job needs, and this one is the sponsor of those that come.
        self.short = False
        self.newcomer = False  # whether this worker was started again, and nobody has let it in yet
        self.to_admit: dict[int, wire.Newcomer] = {}  # by rank: the newcomers that this worker is to let in
        self._epochs: dict[int, int] = {}  # by rank: of the latest news of where its server is
        self._faults: dict[int, list[KVStoreError]] = {}
        self._latest_fault = 0
        self._asked: Operation | None = None
        self._heartbeat: Heartbeat | None = None
        self._trims_at = clock() + LOOK_S
        self.left = False
        if config.trace.last:
            self._trace(config.trace)

    def join(self) -> Session:
        """Join the job; return this session. If anything but an ``Exception`` ends the call, call it again to go on.

        Raises:
            DeadlineExceeded: not all members came in time; the message names the missing.
            ConfigError: the scheduler has refused this process.
        """
        try:
            self._join()
        except Exception as exc:
            self.give_up(f"it gave up joining: {type(exc).__name__}: {exc}"[: wire.MAX_REASON])
            raise
        return self

    def _join(self) -> None:
        self.scheduler = self.client.connect(self.config.root, "the scheduler")
        welcome = self._welcome()
        self.client.node = wire.Node(self.config.role, welcome.rank, welcome.incarnation)
        self.client.links.process = process_name(self.config.role, welcome.rank, self.config.start)
        self.client.guide = self.scheduler
        self.num_workers = welcome.num_workers
        self.newcomer = self.config.role == "worker" and welcome.incarnation > 1
        self.worker_keys, self.aggregator_keys = welcome.worker_keys, welcome.aggregator_keys
        self.aggregated = welcome.aggregated
        self.addresses = welcome.servers
        if self.config.role == "worker":
            self.servers = [
                self.client.connect(endpoint, f"server {rank}", bulk=True)
                for rank, endpoint in enumerate(self.addresses)
            ]
        if welcome.aggregator:
            name = f"aggregator {self.config.aggregator}"
            servers = len(self.addresses)
            window = WindowSize(servers * self.config.window_bytes, servers * self.config.first_bytes)
            self.aggregator = self.client.connect(welcome.aggregator, name, bulk=True, window=window)
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._make_transport,
                self.config.root,
                self.client.node,
                self.config.heartbeat_s,
                self.config.heartbeat_timeout_s,
                self._clock,
                Listener(self._take_notice, self.client.fail, self._line_is_back, self._trace),
                partial(PulseProcess, self.config, self.client.node) if self._pulse else None,
                self._thread,
                self._report_worker if self.config.role == "worker" else None,
                self.tracer,
            )
            if self.tracer is not None:
                self.tracer.wake = self._heartbeat.flush_trace
        self._heartbeat.start()
        if self.config.role == "worker":
            self.client.mutual.say = lambda prompt, found: self.report(
                wire.Stuck(self.client.node, prompt, list(found.waits), list(found.missing), found.text)
            )

    def when_traced(self, take: Callable[[Tracer], None]) -> None:
        """Call ``take`` with this process's tracer: now if there is one, else when it is made.

        The later call is in the heartbeat's thread. ``take`` may be called twice with the same tracer.
        """
        self._traced.append(take)
        if self.tracer is not None:
            take(self.tracer)

    def _trace(self, window: RoundWindow) -> None:
        if self.tracer is not None and self.tracer.window == window:
            return
        if self.tracer is not None:
            self.tracer.turn_to(window)
            return
        tracer = self.tracer = Tracer(window, self._clock)
        if self._heartbeat is not None:
            tracer.wake = self._heartbeat.flush_trace
            self._heartbeat.trace(tracer)
        for take in list(self._traced):
            take(tracer)

    def _welcome(self) -> wire.Welcome:
        """Ask to join, and wait for the others: a worker up to its limit, others while the scheduler lives."""
        try:
            welcome: wire.Welcome = (self._asked or self._ask()).wait()
        except NodeLost as exc:
            config = self.config
            if config.start > 1 or config.rank_hint >= config.num_workers:  # a job that goes on, or has just ended
                exc.cause = exc.cause or process_name(config.role, config.rank_hint, config.start)
            raise
        except DeadlineExceeded as exc:
            raise DeadlineExceeded(f"{exc}{self._unresolved() if exc.silent else ''}", exc.silent) from None
        return welcome

    def _ask(self) -> Operation:
        longest = self.config.join_limit_s if self.config.role == "worker" else math.inf
        limits = WaitLimits(min(self.config.join_timeout_s or self.config.timeout_s, longest), longest)
        operation = Operation(f"joining the job at {split_key(self.config.root)[0]}", (), self.client, limits=limits)
        request = _JoinRequest(self.scheduler, operation, self.config, self._address)
        self.client.submit(operation, ready, [request], partial(self._has_asked, operation))
        return operation

    def _has_asked(self, operation: Operation) -> None:
        self._asked = operation

    def _unresolved(self) -> str:
        root = split_key(self.config.root)[0]
        try:
            if root.startswith("tcp://"):
                resolve(host_and_port(root)[0])
        except ConfigError as exc:
            return f": {exc}"
        return ""

    def give_up(self, error: str) -> None:
        """Leave before having joined, so that the scheduler does not count on this process."""
        try:
            with contextlib.suppress(KVStoreError):
                if self.scheduler:
                    self.client.tell(self.scheduler, wire.Leave, error=error)
        finally:
            self._end(linger=1.0)

    def heartbeat_ended(self, timeout: float) -> bool:
        return self._heartbeat is None or self._heartbeat.join(timeout)

    def carrier(self, server: int) -> Peer:
        """Return where this member sends its pushes and pulls for ``server``: to the aggregator, if it has one."""
        aggregator = self.aggregator  # once: another thread may hear that it is lost
        return self.servers[server] if aggregator is None else aggregator

    def _carriers(self) -> list[Peer]:
        aggregator = self.aggregator
        return self.servers if aggregator is None else [aggregator]

    @property
    def rank(self) -> int:
        return self.client.node.rank

    @property
    def members(self) -> list[int]:
        """The workers that are in, as far as this member knows: not lost, and let in if they came later."""
        return [rank for rank in (*range(self.num_workers), *sorted(self.added)) if rank not in self.lost]

    @property
    def gives(self) -> bool:
        """Whether this worker gives new keys their first values unasked. One that was started again does not."""
        return self.client.node[1:] == (0, 1)

    @property
    def leads(self) -> bool:
        """Whether this worker does what one does for all, as far as it knows: the lowest rank that is in."""
        first = min([self.rank, *self.members]) if self.lost else 0
        return not self.newcomer and self.rank == first

    def check(self, store: int) -> None:
        self.client.check()
        faults = self._faults.get(store)
        if faults:
            raise faults.pop(0)

    def report(self, notice: wire.Message) -> None:
        """Send the scheduler a notice over the heartbeat's link, from any thread. Before ``join`` ends it is lost."""
        if self._heartbeat is not None:
            self._heartbeat.say(notice)

    def _report_worker(self) -> wire.WorkerReport:
        now = self._clock()
        if now >= self._trims_at:
            self._trims_at = now + LOOK_S
            self.client.links.trim()
        return self.activity.report()

    def num_dead_nodes(self) -> int:
        counted = self.client.call(self.scheduler, "asking for the dead", wire.Census)
        return int(counted.count)

    def leave(self, error: str | None = None) -> None:
        """Leave the job: in order, or because of ``error``, which then fails the job. May be called again."""
        if self.left:
            return
        self.left = True
        text = error if error is None else error[: wire.MAX_REASON]
        try:
            self._send_trace()
            if self.client.failure is None:
                self.client.call(self.scheduler, "leaving the job", wire.Leave, LEAVE_S, error=text)
            else:
                self.client.tell(self.scheduler, wire.Leave, error=text)
        except KVStoreError as exc:
            log.warning("left the job without the scheduler's answer: %s", exc)
        finally:
            self._end(linger=1.0)

    def _send_trace(self) -> None:
        """Send the rest of the trace before the scheduler lets this process go, over the link of requests."""
        if self.tracer is None or self.rank < 0:
            return
        with contextlib.suppress(KVStoreError):  # a trace must not keep anybody
            for chunk in self.tracer.chunks(self.client.node):
                self.client.notify(self.scheduler, chunk)

    def abandon(self) -> None:
        """End this process's membership without a word: another process has its place, and the scheduler knows."""
        self.left = True
        self._end()

    def _end(self, linger: float = 0.0) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self.client.close(linger)

    def _line_is_back(self) -> None:
        if not self.config.one_host:  # on one host no line was cut; a peer was slow
            self.client.reconnect()
            if self._on_line_back is not None:
                self._on_line_back()

    def _take_notice(self, notice: wire.Message) -> None:
        if isinstance(notice, wire.JobFailed):
            self.client.fail(NodeLost(notice.text, notice.cause))
        elif isinstance(notice, wire.Moved):
            if not self._follow(notice):
                return
        elif isinstance(notice, wire.Roster):
            self.lost = frozenset(notice.lost)
            self.added = frozenset(rank for rank in notice.came if rank >= self.num_workers)
            self.short = self.leads and len(self.members) < self.config.min_workers
            if self.aggregator is not None and self.config.aggregator in notice.aggregators:
                # In this order: whoever finds the links without the aggregator must not choose it any more.
                lost, self.aggregator = self.aggregator, None
                self.client.bypass(lost, self.config.aggregator)
        elif isinstance(notice, wire.Newcomer):
            self.to_admit[notice.rank] = notice
        elif isinstance(notice, wire.StillStuck):
            self.client.prompt(notice.number)
        elif isinstance(notice, wire.Deadlock):
            self.client.condemn(notice.waits, notice.text)
        elif isinstance(notice, wire.Fault) and notice.number > self._latest_fault:
            self._latest_fault = notice.number
            self._faults.setdefault(notice.store, []).append(rebuild(notice.kind, notice.text))
        if self._on_notice is not None:
            self._on_notice(notice)

    def _follow(self, moved: wire.Moved) -> bool:
        """Use a server where it is from now on; return False if that is known already."""
        rank, known = moved.rank, self._epochs.get(moved.rank, 0)
        if moved.epoch <= known or not 0 <= rank < len(self.addresses):
            return False
        self._epochs[rank] = moved.epoch
        self.takeovers += 1
        self.addresses[rank] = moved.address
        if self.servers:
            self.client.move(self.servers[rank], moved.address)
        return True


class _JoinRequest(PendingRequest):
    __slots__ = ("address", "config")

    def __init__(self, peer: Peer, operation: Operation, config: Config, address: str) -> None:
        super().__init__(peer, operation)
        self.config = config
        self.address = address

    def message(self, sender: wire.Sender) -> wire.Join:
        me = sender._replace(node=sender.node._replace(rank=self.config.rank_hint))
        return wire.Join(
            me,
            address=self.address,
            aggregator=self.config.aggregator,
            start=self.config.start,
            host=host_name(),
            pid=os.getpid(),
        )

    def take(self, reply: wire.Welcome) -> None:
        self.operation.take(reply)
