"""How long tests wait, and their one way to wait for something to happen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds. Nothing that works takes so long, on the busiest machine: who only wants to know that something does not
# hang waits for LONG. Where all tests run at once, a job that takes 15 s alone may take a minute. What is promised
# within a few seconds may take PROMPT, where the alternative takes minutes.
LONG = 120.0
PROMPT = 30.0


def until(
    condition: Callable[[], Any],
    what: str = "something",
    timeout: float = LONG,
    over: Callable[[], str | None] = lambda: None,
    step: float = 0.02,
) -> Any:
    """Wait until a condition holds, and return what it returned.

    Args:
        condition: is asked again and again.
        what: is waited for.
        timeout: seconds.
        over: says why there is nothing to wait for any more; nothing as long as there is.
        step: seconds between two questions; more where each costs something.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        ended = over()
        assert ended is None or condition(), f"{what} will not come: {ended}"
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(step)
    return value


def came(transport: Any) -> Any:
    """The next message, with its peer; there must be one."""
    received = transport.recv(LONG)
    assert received is not None, "nothing came"
    return received
