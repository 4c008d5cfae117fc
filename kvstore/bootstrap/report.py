"""Tells a job which of its processes has ended, so that the others can name it before they are ended too."""

from __future__ import annotations

from collections.abc import Mapping

LINGER_S = 0.3  # how long the message may take to leave


def tell(env: Mapping[str, str], role: str, rank: int, how: str, start: int = 0, final: bool = False) -> None:
    """Tell the scheduler of a job that a member has ended. The scheduler tells all other members.

    Args:
        env: the environment of the process that has ended, or of the scheduler; the keys of either will do.
        role, rank: who has ended.
        how: in words: "exited with code 7".
        start: which of that member's processes; 0 for the latest.
        final: whether it is not started again.
    """
    if role == "scheduler":
        return  # nobody is left to tell; the others hear its silence
    from kvstore.job.config import Config
    from kvstore.transport.choose import links  # only now: launch.py starts without it
    from kvstore.wire import MAX_REASON, Lost, encode

    config = Config.from_env(env)
    transport = links(config)()
    try:
        transport.send(transport.connect(config.root), encode(Lost(role, rank, how[:MAX_REASON], start, final)))
    finally:
        transport.close(linger=LINGER_S)
