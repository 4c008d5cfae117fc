"""How processes of this package start and end: whether a server is one of a pair, how often garbage is collected."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from kvstore.job.config import Config
from kvstore.transport import Transport

LEAST = 10_000  # new objects
EACH = 100  # objects that a worker's messages of one round are, about


def collect_seldom(workers: int) -> None:
    """Let the collector run when there are more new objects than the messages of a round of ``workers`` make.

    By default it runs whenever 700 new objects are there, and looks at all objects again when their number has grown by
    a quarter. The messages of a round of thousands of workers are hundreds of thousands of objects that wait for the
    round's end, and a server came to spend three quarters of its time on looking at them. What a round of 26 tables
    makes, it would look at several times a round. A look at all objects takes 0.1 to 0.2 s in a process that has
    imported torch, and nearly all of them are torch's modules, which stay.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, LEAST, EACH * workers), *older)


@contextmanager
def importing() -> Iterator[None]:
    """Do not collect while modules are imported, and never look at their objects."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run ``main``, and end this process with the code that it returns, or raises ``SystemExit`` with.

    All functions that were registered for the exit run. The interpreter's own end does not: it takes all modules apart,
    which takes 0.3 s with torch imported, and copies memory that forks share.
    """
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_member(
    config: Config,
    make_transport: Callable[[], Transport],
    endpoint: str,
    clock: Callable[[], float] = time.monotonic,
    thread: Callable[..., threading.Thread] = threading.Thread,
) -> int:
    """Be the server, standby or aggregator of ``config``, until all workers are done or the job has failed."""
    from servers.member import Surroundings  # brings torch, as the others do; the scheduler does without

    around = Surroundings(config, make_transport, endpoint, clock, thread)
    if config.role == "aggregator":
        from servers.aggregator.aggregator_process import AggregatorProcess

        return AggregatorProcess(around).run()
    if config.replicas:
        from servers.replication.pair_process import ReplicaProcess

        return ReplicaProcess(around).run()
    from servers.server import Server

    return Server(around).run()
