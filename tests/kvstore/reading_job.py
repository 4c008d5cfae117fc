"""Jobs in this process, and readers of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threaded import ThreadedJob
from waiting import LONG

from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair
from kvstore.reading.reader import Reader


class KeyedJob(ThreadedJob):
    """A job over TCP with keys, and readers that have one of their own.

    Attributes:
        reader: the public and the secret key of readers.
    """

    def __init__(self, workers: int = 1, servers: int = 2, readers: int = 4) -> None:
        super().__init__(workers, servers, kind="curve", readers=readers, reader_share=1.0)
        self.reader = pair()

    def config(self, role: str, rank: int = -1) -> Config:
        if role == "reader":
            config = super().config("worker", 0)
            assert config.keys is not None
            return dataclasses.replace(config, role=role, keys=CurveKeys.of_reader(self.reader[1], config.keys.root))
        config = super().config(role, rank)
        if role == "worker" or config.keys is None:
            return config
        return dataclasses.replace(config, keys=dataclasses.replace(config.keys, reader=self.reader[0]))


@contextmanager
def reader_of(
    job: ThreadedJob, max_staleness: int = 0, timeout: float = LONG, store: int | str = 1
) -> Iterator[Reader]:
    config = job.config("reader")
    with Reader.of(config, f"{store}", max_staleness, timeout, job.ends(config)) as reader:
        yield reader


def job_with_readers(workers: int = 1, servers: int = 2, readers: int = 4, **more: Any) -> ThreadedJob:
    return ThreadedJob(workers, servers, readers=readers, reader_share=1.0, **more)
