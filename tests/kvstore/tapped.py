"""A job inside this process whose members a test can silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from threaded import ThreadedJob

from kvstore.errors import KVStoreError
from kvstore.job.config import Config
from kvstore.transport import Transport


class Tapped(ThreadedJob):
    """A cluster that can silence a member: its links are cut, without a word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(heartbeat_s=0.05, heartbeat_timeout_s=2.0, **options)
        self._made: dict[str, list[Transport]] = {}

    def ends(self, config: Config) -> Callable[[], Transport]:
        make = super().ends(config)
        name = config.role if config.role == "scheduler" else f"{config.role} {config.rank_hint}"

        def tapped() -> Transport:
            made = make()
            self._made.setdefault(name, []).append(made)
            return made

        return tapped

    def silence(self, name: str) -> None:
        for transport in self._made[name]:
            transport.close()


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KVStoreError as exc:
        return exc
