"""An agent as launch.py sees it: what it has said, and whether it is still there."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.job.contract import Role
from kvstore.wire import Message
from launcher.agents.carrier import Carrier
from launcher.agents.links.link import AgentLink

M = TypeVar("M", bound=Message)

_CARRIER_S = 0.5  # a carrier whose link has ended is about to end too, and knows why


class RemoteAgent:
    """One agent.

    Args:
        host: what the user calls its host; what the agent does if that is unknown.
        link: to it.
        carrier: what has brought it, if that is its own.
        hint: what to do about something that the carrier has said; nothing if it knows nothing.
    """

    def __init__(
        self, host: str, link: AgentLink, carrier: Carrier | None = None, hint: Callable[[str], str] = lambda _: ""
    ) -> None:
        self.host = host
        self._hint = hint
        self.carrier = carrier
        self.lost: str | None = None
        self.left = False  # in order, and that is why it is lost
        self.code = 1
        self.heard = time.monotonic()
        self.members: list[tuple[Role, int]] = []
        self.indices: list[int] = []
        self.empty = False
        self.handler: Callable[[RemoteAgent, Message], None] | None = None
        self.on_loss: Callable[[RemoteAgent], None] | None = None
        self._said: dict[type[Message], Message] = {}
        self._link = link

    def open(self, selector: selectors.BaseSelector) -> None:
        """Begin to listen to it."""
        self._link.open(selector, self._take, self._end)

    def send(self, message: Message) -> None:
        """Tell it something."""
        self._link.send(message)

    def said(self, kind: type[M]) -> M | None:
        """Its last message of that kind."""
        message = self._said.get(kind)
        return message if isinstance(message, kind) else None

    def reading(self, wanted: bool) -> None:
        """Whether to take what it sends."""
        self._link.reading(wanted)
        self.heard = time.monotonic()

    def lose(self, why: str, code: int = 1) -> None:
        """Give it up; its tasks count as ended with that exit code."""
        if self.lost is None:
            self._link.close()
            self.code = code
            self.lost = why
            if self.on_loss is not None:
                self.on_loss(self)

    def give_up(self, why: str) -> None:
        """The same, of one that does not answer; nobody need wait for a carrier of its own to go by itself."""
        self.lose(why)
        if self.carrier is not None and self.carrier.link is not None:
            self.carrier.signal(signal.SIGTERM)

    @property
    def explanation(self) -> str:
        """What its carrier, or whatever else is there instead of an agent, has printed."""
        if self.carrier is None:
            return ""
        return self.carrier.explanation or (self.carrier.link.preamble if self.carrier.link else "")

    def close(self) -> None:
        """End the link without a word to anybody."""
        self._link.close()

    def _take(self, message: Message) -> None:
        self.heard = time.monotonic()
        if self.handler is not None:
            self.handler(self, message)
        else:
            self._said[type(message)] = message

    def _end(self, how: str) -> None:
        if self.carrier is not None:
            ended = self.carrier.wait(_CARRIER_S)
            if ended is not None:
                how = f"{self.carrier.name} {ended}"
            if said := self.explanation:
                how += f": {said}"
            if hint := self._hint(said or how):
                how += f"\n({hint})"
        self.lose(how)
