"""A job in this process, with a reader of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threaded import ThreadedJob
from waiting import LONG

from kvstore.reading.reader import Reader


@contextmanager
def reader_of(job: ThreadedJob, max_staleness: int = 0, timeout: float = LONG, store: int = 1) -> Iterator[Reader]:
    config = job.config("reader")
    with Reader.of(config, store, max_staleness, timeout, job.ends(config)) as reader:
        yield reader


def job_with_readers(workers: int = 1, servers: int = 2, readers: int = 4, **more: Any) -> ThreadedJob:
    return ThreadedJob(workers, servers, readers=readers, **more)
