"""An end of a link, and ways to wait for what it brings."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from waiting import LONG

from kvstore import wire
from launcher.agents.links.link import AgentLink
from launcher.agents.links.protocol import Output


class End:
    """A link, what it has brought, and how it has ended."""

    def __init__(self, link: AgentLink, selector: selectors.BaseSelector) -> None:
        self.link = link
        self.said: list[wire.Message] = []
        self.ends: list[str] = []
        link.open(selector, self.said.append, self.ends.append)

    @property
    def taken(self) -> int:
        return sum(len(part) for message in self.said if isinstance(message, Output) for part in message.buffers)


def turn(selector: selectors.BaseSelector, timeout: float) -> bool:
    ready = selector.select(timeout)
    for key, _ in ready:
        key.data()
    return bool(ready)


def until(selector: selectors.BaseSelector, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        turn(selector, 0.05)


def settle(selector: selectors.BaseSelector) -> None:
    """Over pipes, what has not happened when nothing is ready will not."""
    while turn(selector, 0):
        pass
