"""One agent as launch.py sees it: its messages, and whether it is alive."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore import wire
from kvstore.job.contract import Role
from launcher.agents.carrier import Carrier
from launcher.agents.links.link import AgentLink

M = TypeVar("M", bound=wire.Message)

_CARRIER_S = 0.5  # when a link has ended, its carrier exits soon and says why


class RemoteAgent:
    """One agent.

    Args:
        host: the name of its host as the user has given it, or else as the agent has.
        link: the link to it.
        carrier: the program that has started it, if there is one.
        hint: returns what the user can do about a message of the carrier; empty if unknown.
    """

    def __init__(
        self, host: str, link: AgentLink, carrier: Carrier | None = None, hint: Callable[[str], str] = lambda _: ""
    ) -> None:
        self.host = host
        self._hint = hint
        self.carrier = carrier
        self.lost: str | None = None
        self.left = False  # it has left in order
        self.code = 1
        self.heard = time.monotonic()
        self.members: list[tuple[Role, int]] = []
        self.indices: list[int] = []
        self.empty = False
        self.handler: Callable[[RemoteAgent, wire.Message], None] | None = None
        self.on_loss: Callable[[RemoteAgent], None] | None = None
        self._said: dict[type[wire.Message], wire.Message] = {}
        self._link = link

    def open(self, selector: selectors.BaseSelector) -> None:
        """Begin to receive its messages."""
        self._link.open(selector, self._take, self._end)

    def send(self, message: wire.Message) -> None:
        """Send it a message."""
        self._link.send(message)

    def said(self, kind: type[M]) -> M | None:
        """Its last message of a type; None if there was none."""
        message = self._said.get(kind)
        return message if isinstance(message, kind) else None

    def reading(self, wanted: bool) -> None:
        """Whether to take its output."""
        self._link.reading(wanted)
        self.heard = time.monotonic()

    def lose(self, why: str, code: int = 1) -> None:
        """Give it up. Its tasks count as ended with that exit code."""
        if self.lost is None:
            self._link.close()
            self.code = code
            self.lost = why
            if self.on_loss is not None:
                self.on_loss(self)

    def give_up(self, why: str) -> None:
        """Give up an agent that does not answer, and end its carrier, if only this agent uses it."""
        self.lose(why)
        if self.carrier is not None and self.carrier.link is not None:
            self.carrier.signal(signal.SIGTERM)

    @property
    def explanation(self) -> str:
        """What its carrier has printed, or what has answered instead of an agent."""
        if self.carrier is None:
            return ""
        return self.carrier.explanation or (self.carrier.link.preamble if self.carrier.link else "")

    def close(self) -> None:
        """End the link without telling anybody."""
        self._link.close()

    def _take(self, message: wire.Message) -> None:
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
