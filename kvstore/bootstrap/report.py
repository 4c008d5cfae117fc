"""Tells a job which of its processes has ended, so that the others can name it before they are ended too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore import wire

WAIT_S = 0.3  # how long the scheduler may take to confirm that it has heard


def tell(env: Mapping[str, str], role: str, rank: int, how: str, start: int = 0, final: bool = False) -> bool:
    """Tell the scheduler of a job that a member has ended. The scheduler tells all other members.

    Returns:
        Whether the scheduler has heard it. If not, it may hear it still, or may be about to be started again.
    """
    if role == "scheduler":
        return False  # nobody is left to tell; the others hear its silence
    from kvstore import wire  # only now: launch.py starts without it

    return say(env, wire.Lost(role, rank, how[: wire.MAX_REASON], start, final))


def say(env: Mapping[str, str], news: wire.Message) -> bool:
    """Tell the scheduler of a job something, with the keys in the environment of one of its members.

    Returns:
        Whether the scheduler has heard it; see ``tell``.
    """
    from kvstore import wire
    from kvstore.job.config import Config
    from kvstore.transport.choose import links

    config = Config.from_env(env)
    # Any question, which is answered once what was said before has been heard.
    question = wire.Explain(wire.Sender(wire.Node("launcher", -1, 0), 1, 1), about=0)
    said = [wire.encode(news), wire.encode(question)]
    transport = links(config)()
    try:
        scheduler = transport.connect(config.root)
        deadline = time.monotonic() + WAIT_S
        for message in said:
            transport.send(scheduler, message)
        while (left := deadline - time.monotonic()) > 0:
            received = transport.recv(left)
            if received is not None and received[1]:
                return True
            if received is not None:  # the link has been made anew
                for message in said:
                    transport.send(scheduler, message)
        return False
    finally:
        transport.close()
