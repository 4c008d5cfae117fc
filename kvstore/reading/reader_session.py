"""A reader's links to the scheduler and the servers. It is no member: no heartbeats, and no member waits.

When an answer is late, the reader asks the scheduler where the servers are: one of them may have been replaced. If
nobody listens where the scheduler was, the job has ended.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeLost
from kvstore.job.config import Config
from kvstore.job.curve_keys import split_key
from kvstore.member.client import Client
from kvstore.member.outstanding import Effect, Question
from kvstore.spec import Key
from kvstore.ticket import Operation, WaitLimits
from kvstore.transport import Peer, Transport
from kvstore.transport.system_sockets import listening

LATE_S = 1.0  # an answer that takes longer may not come from there
GONE_S = 5.0  # nobody has listened for so long: it is not started again
FRESH_S = 20.0  # how long the servers' places count as known, and the scheduler counts this reader without hearing it
MOST_ASKED = 64  # questions that wait for an answer
AGAIN_S = 0.1  # between two questions whether all members have joined
CLOSE_S = 0.5  # how long goodbyes may take to leave

Ask = tuple[
    int | None, type[wire.Request], dict[str, Any], Callable[[Any], None]
]  # server (None: scheduler), request, answer


class _Read(Question):
    """A question whose answer is dropped if it comes after its call is over: others may have the memory then.

    That is looked at when it comes. A second Ctrl-C may end what the call does because of the first.
    """

    __slots__ = ("_session",)

    def __init__(self, session: ReaderSession, *question: Any) -> None:
        super().__init__(*question)
        self._session = session

    def take(self, reply: Any) -> Effect | None:
        return super().take(reply) if self._session.asking is self.operation else None


class ReaderSession:
    """See the module. ``listens``: whether anybody listens at an endpoint; None if that cannot be known.

    Attributes:
        asking: what is asked now, or was last.
    """

    def __init__(
        self,
        config: Config,
        make_transport: Callable[[], Transport],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        listens: Callable[[str], bool | None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.closed = False
        self.asking: Operation | None = None
        self._clock = clock
        self._listens = listens or listening
        self._sleep = sleep
        self._root = config.root
        self._timeout_s = timeout_s
        self._client = Client(
            make_transport,
            clock,
            WaitLimits(timeout_s, timeout_s),
            "reader",
            secrets.randbits(62),
            config.window_bytes,
        )
        self._scheduler: Peer = b""
        self._addresses: list[str] = []
        self._servers: list[Peer] = []
        self._looking: Operation | None = None
        self._looked_at = float("-inf")  # when the scheduler was last asked
        self._refused_since: float | None = None  # since when nobody has listened at the scheduler's address

    def connect(self) -> None:
        """Find the servers.

        Raises:
            DeadlineExceeded: nobody answers, or not all members have joined.
            UsageError: the job takes no readers, or has as many as it takes.
            NodeLost: the job has failed, or has ended.
        """
        deadline = self._clock() + self._timeout_s
        self._scheduler = self._client.connect(self._root, "the scheduler")
        while not self._addresses:
            self._look()
            while not self._settled(deadline):
                self._require_time(deadline)
            if not self._addresses:
                self._require_time(deadline)
                self._sleep(AGAIN_S)

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def ask(
        self,
        what: str,
        keys: Sequence[Key],
        asks: Iterable[Ask],
        deadline: float,
        at_once: int = MOST_ASKED,
        late: Callable[[], object] = bool,
    ) -> None:
        """Ask, and return when all answers have been taken.

        At most ``at_once`` questions wait for an answer. Each other one of ``asks`` is made when it can be asked.
        ``late`` is called each ``LATE_S`` in which no answer comes.

        Raises:
            DeadlineExceeded: somebody has not answered; the message says who.
            NodeLost: the job has failed, or has ended.
            KVStoreError: an answer is an error, the first of them.
        """
        if self._clock() - self._looked_at > FRESH_S:
            self._look()
        operation = self.asking = Operation(what, keys, self._client)
        questions = (
            _Read(self, self._scheduler if server is None else self._servers[server], operation, kind, fields, take)
            for server, kind, fields, take in asks
        )
        try:
            while True:
                asked = list(islice(questions, at_once - len(operation.open)))
                if asked:
                    self._client.ask(operation, *asked)
                if operation.error is not None:  # what the others bring is of no use
                    self._client.give_up(operation)
                if not operation.open:
                    break
                answered = partial(_fewer_open, operation, len(operation.open))
                while not self._client.wait_until(answered, max(0.0, min(LATE_S, deadline - self._clock()))):
                    late()
                    self._raise_if_over()  # also of calls that are all shorter than ``LATE_S``
                    if self._clock() < deadline or self._clock() - self._looked_at >= LATE_S:
                        self._look()
                    if self._clock() >= deadline:
                        raise self._late(operation)
        except BaseException:  # Ctrl-C, too: an answer that comes later must not write into the caller's array
            self._client.give_up(operation)
            raise
        operation.wait()

    def tell(self, server: int, kind: type[wire.Request], fields: Mapping[str, Any]) -> None:
        """Ask a server something whose answer does not matter, and go on."""
        self._client.tell(self._servers[server], kind, **fields)

    def deadline(self, timeout: float | None) -> float:
        """Return when a wait of ``timeout`` seconds, or of the usual length, is over."""
        return self._clock() + (self._timeout_s if timeout is None else timeout)

    def pause(self, seconds: float) -> None:
        self._sleep(seconds)

    def now(self) -> float:
        return self._clock()

    def close(self) -> None:
        """Say goodbye, and close the links. May be called again."""
        if self.closed:
            return
        self.closed, self.asking = True, None
        with contextlib.suppress(KVStoreError):
            for peer in (self._scheduler, *self._servers):
                if peer:
                    self._client.tell(peer, wire.Leave, error=None)
        self._client.close(linger=CLOSE_S if self._servers else 0.0)

    # ---- where servers are

    def _look(self) -> None:
        """Ask the scheduler where the servers are, unless it has been asked and has not answered."""
        if self._looking is not None and self._looking.open:
            return
        self._looked_at = self._clock()
        looking = self._looking = Operation("finding the servers", (), self._client)
        self._client.ask(looking, Question(self._scheduler, looking, wire.Connect, {}, self._follow))

    def _settled(self, deadline: float) -> bool:
        """Wait a moment for the scheduler's answer; return whether it is there.

        Raises:
            KVStoreError: it is an error.
        """
        looking = self._looking
        if looking is None:
            return True
        if not self._client.settle(looking, max(0.0, min(LATE_S, deadline - self._clock()))):
            return False
        looking.wait()
        return True

    def _follow(self, connected: wire.Connected) -> None:
        """Use the servers where they are from now on."""
        self._refused_since = None
        if self._client.node.rank < 0:
            self._client.node = wire.Node("reader", connected.rank, self._client.node.incarnation)
        if not self._servers:
            self._addresses = list(connected.servers)
            return
        for rank, (before, now) in enumerate(zip(self._addresses, connected.servers, strict=False)):
            if before != now:
                self._addresses[rank] = now
                self._client.move(self._servers[rank], now)

    def link(self) -> None:
        """Make the links to the servers that ``connect`` has found."""
        self._servers = [
            self._client.connect(address, f"server {rank}", bulk=True) for rank, address in enumerate(self._addresses)
        ]

    # ---- why nobody answers

    @property
    def _where(self) -> str:
        return split_key(self._root)[0]

    def _raise_if_over(self) -> None:
        """Raise if the scheduler has said that the job is over, or nobody listens there any more."""
        looking = self._looking
        if looking is None:
            return
        if not looking.open:
            looking.wait()
            return
        heard = self._listens(self._root)
        if heard is not False:
            self._refused_since = None
            return
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since >= GONE_S or not _may_come_back(self._root):
            raise NodeLost(f"the job has ended: nobody listens at {self._where} any more")

    def _require_time(self, deadline: float) -> None:
        """Raise ``DeadlineExceeded`` if it is late, before there are servers."""
        if self._clock() >= deadline:
            raise DeadlineExceeded(self._why_not_connected(), ("the scheduler",))

    def _why_not_connected(self) -> str:
        if self._client.node.rank >= 0:
            return f"the job at {self._where} has not begun: not all its members have joined"
        if self._listens(self._root) is False:
            return f"nobody listens at {self._where}: the job has not begun, or has ended"
        return (
            f"{self._where} has not answered within {self._timeout_s:g} s: is the key this job's, and was the job "
            "started with launch.py --readers?"
        )

    def _late(self, operation: Operation) -> DeadlineExceeded:
        silent = tuple(sorted({peer.decode() for peer in self._client.unanswered(operation)}))
        return DeadlineExceeded(
            f"{operation} is not done in time: no answer from {', '.join(silent)}; "
            "workers go first, and readers get the time that is left (KVSTORE_READER_SHARE)",
            silent,
        )


def _fewer_open(operation: Operation, count: int) -> bool:
    return len(operation.open) < count


def _may_come_back(endpoint: str) -> bool:
    """Return whether a scheduler may be started again there: not if the job's directory is gone."""
    bare = split_key(endpoint)[0]
    return not bare.startswith("ipc://") or Path(bare.removeprefix("ipc://")).parent.is_dir()
