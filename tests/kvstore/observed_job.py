"""Jobs in this process, and observers of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from threaded import ThreadedJob
from waiting import LONG

from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair
from kvstore.observing.observer_session import ObserverSession


class ObservedJob(ThreadedJob):
    """A job that observers may look at.

    Attributes:
        observer: their public and secret keys, if the job's links have keys.
    """

    def __init__(self, workers: int = 1, servers: int = 1, kind: str = "inproc", **more: Any) -> None:
        super().__init__(workers, servers, kind=kind, **more)
        self.observer = pair() if kind == "curve" else ("", "")

    def config(self, role: str, rank: int = -1) -> Config:
        if role == "observer":
            config = super().config("worker", 0)
            root = "" if config.keys is None else config.keys.root
            keys = CurveKeys.of_observer(self.observer[1], root) if self.observer[1] else None
            return dataclasses.replace(config, role=role, rank_hint=-1, keys=keys)
        config = super().config(role, rank)
        if role != "scheduler" or config.keys is None:
            return config
        return dataclasses.replace(config, keys=dataclasses.replace(config.keys, observer=self.observer[0]))

    def observe(self, timeout_s: float = LONG, config: Config | None = None) -> ObserverSession:
        config = config or self.config("observer")
        return ObserverSession(config, timeout_s, self.ends(config))
