"""Faults that a server injects into itself, for drills: at a round, it is killed or stopped (`launch.py --inject`).

Only the server knows its rounds, so only it can do this at the worst moment: the round is over, and nobody knows yet.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from kvstore import wire
from servers.requests.replies import Outbox
from servers.service import Handle

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def injecting(
    handle: Handle,
    faults: list[tuple[str, int]],
    rounds: Callable[[], int],
    send: Callable[[int], None] = lambda signum: os.kill(os.getpid(), signum),
) -> Handle:
    """Return ``handle`` with faults; itself if there are none, so that nothing is looked for.

    Args:
        handle: takes a message, and returns what to send.
        faults: an action of ``SIGNALS`` and a round of each, by rounds. Those that have come are removed.
        rounds: returns how many rounds there have been.
        send: sends a signal to this process.
    """
    if not faults:
        return handle

    def handle_and_fail(peer: bytes, message: wire.Message) -> Outbox:
        outbox = handle(peer, message)
        while faults and rounds() >= faults[0][1]:
            send(SIGNALS[faults.pop(0)[0]])
        return outbox

    return handle_and_fail
