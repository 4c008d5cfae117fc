"""An observer's link to the scheduler. It is no member: it does not beat, and nobody waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeLost, WireError
from kvstore.job.config import Config
from kvstore.job.curve_keys import split_key
from kvstore.job.place import ObservingPlace
from kvstore.job.valid_values import RoundWindow
from kvstore.member.client import Client
from kvstore.member.outstanding import Question
from kvstore.observing.view import Event, JobView
from kvstore.ticket import Operation, WaitLimits
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.transport.system_sockets import listening
from kvstore.wire.guests import MOST_EVENTS, MOST_LOCATED

TIMEOUT_S = 5.0
LATE_S = 0.5  # an answer that takes longer may never come
GONE_S = 1.5  # nobody has listened for so long: the job has ended
UNCHANGED = RoundWindow()
CLOSE_S = 0.3  # how long the goodbye may take to leave


class ObserverSession:
    """An observer's link to the scheduler. One thread at a time may use it; ``timeout_s`` is of every wait."""

    def __init__(
        self,
        config: Config,
        timeout_s: float = TIMEOUT_S,
        make_transport: Callable[[], Transport] | None = None,
        clock: Callable[[], float] = time.monotonic,
        listens: Callable[[str], bool | None] = listening,
    ) -> None:
        self._root = config.root
        self._timeout_s = timeout_s
        self._clock = clock
        self._listens = listens
        limits = WaitLimits(timeout_s, timeout_s)
        nonce = secrets.randbits(62)
        make_transport = make_transport or links(config)
        self._client = Client(make_transport, clock, limits, config.role, nonce, config.window_bytes)
        self._scheduler = self._client.connect(config.root, "the scheduler")
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._closed = False

    @classmethod
    def of(
        cls, place: ObservingPlace, timeout_s: float = TIMEOUT_S, env: Mapping[str, str] = os.environ
    ) -> ObserverSession:
        """Nobody is asked before ``look`` or ``locate``."""
        return cls(place.config(env), timeout_s)

    def look(self) -> JobView:
        """Return how the job is now, with the latest events."""
        observed: wire.Observed = self._ask(wire.Observe, after=self._events[-1].number if self._events else 0)
        view = JobView.of(observed)
        if view.events and self._events and view.events[0].number <= self._events[-1].number:
            self._events.clear()  # the scheduler has been started again, and has told all
        self._events.extend(view.events)
        return dataclasses.replace(view, events=tuple(self._events))

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, after ``wake``, or when a member has died: the scheduler says that unasked."""
        self._client.alone(self._client.links.receive, lambda: False, seconds)

    def wake(self) -> None:
        """End ``wait``. Any thread may call it, until ``close``."""
        self._client.links.interrupt()

    def locate(self, role: str, ranks: Sequence[int]) -> wire.Located:
        """Ask members of one role where they are in their code, in parts; see ``stacks_in``."""
        ranks = sorted(set(ranks))
        parts: list[wire.Located] = [
            self._ask(wire.Locate, role=role, ranks=ranks[first : first + MOST_LOCATED])
            for first in range(0, len(ranks), MOST_LOCATED)
        ]
        return wire.Located(
            0,
            [rank for part in parts for rank in part.ranks],
            [place for part in parts for place in part.places],
            [buffer for part in parts for buffer in part.buffers],
        )

    def fetch_trace(self, after: int, rounds: RoundWindow = UNCHANGED) -> wire.TraceFetched:
        """Return what members have noted after chunk ``after``; ``rounds``: what they are to note from now on."""
        fetched: wire.TraceFetched = self._ask(wire.FetchTrace, after=after, traced=list(rounds))
        return fetched

    def close(self) -> None:
        """Say goodbye, and close the link. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(KVStoreError):
            self._client.tell(self._scheduler, wire.Leave, error=None)
        self._client.close(linger=CLOSE_S)

    def __enter__(self) -> ObserverSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- questions

    def _ask(self, kind: type[wire.Request], **fields: Any) -> Any:
        operation = Operation(f"asking the scheduler to {kind.__name__.lower()}", (), self._client)
        deadline = self._clock() + self._timeout_s
        self._client.ask(operation, Question(self._scheduler, operation, kind, fields, operation.take))
        refused_since: float | None = None
        try:
            while not self._client.settle(operation, max(0.0, min(LATE_S, deadline - self._clock()))):
                now = self._clock()
                # A late answer has two causes: a scheduler that is busy or stopped, which still listens, and one that
                # is gone. The link does not tell them apart, because it reconnects for ever by itself.
                if self._listens(self._root) is not False:
                    refused_since = None
                elif refused_since is None:
                    refused_since = now
                if refused_since is not None and (now - refused_since >= GONE_S or now >= deadline):
                    raise NodeLost(
                        f"nobody listens at {self._where}: the job has not begun, has ended, or its scheduler is dead"
                    )
                if now >= deadline:
                    raise DeadlineExceeded(
                        f"the scheduler at {self._where} has not answered within {self._timeout_s:g} s: it is stopped, "
                        "or its host is overloaded, or the observers' key is another job's",
                        ("the scheduler",),
                    )
        except BaseException:
            self._client.give_up(operation)
            raise
        return operation.wait()

    @property
    def _where(self) -> str:
        return split_key(self._root)[0]


def stacks_in(located: wire.Located) -> Iterator[wire.Stacks]:
    """Yield the stacks that members have answered with."""
    for frame in located.buffers:
        stacks = wire.decode([frame])
        if not isinstance(stacks, wire.Stacks):
            raise WireError(f"expected stacks, got a {type(stacks).__name__}")
        yield stacks
