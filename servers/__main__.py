"""``python -m servers``: run a server, its standby, an aggregator, the scheduler or an observer, by ``DMLC_ROLE``."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module
from types import FrameType

from kvstore.errors import JOB_FAILED_EXIT, KVStoreError, NodeLost
from kvstore.job import threads, tracebacks
from kvstore.job.config import Config
from kvstore.job.exit_report import ExitReport, hand_over
from kvstore.job.processes import allow_many_files, entitle
from kvstore.transport.choose import links
from servers.endpoints import server_endpoint
from servers.processes import collect_seldom, end_with, importing, run_member

TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Run until the job ends; return 0, ``JOB_FAILED_EXIT`` if the job failed, or 1 if this process did.

    A server that was given up, and whose place another process has, returns ``REPLACED_EXIT``.

    SIGTERM ends the process with exit code 143: in order if it serves, at once if it imports a module.
    """
    tracebacks.install_excepthook()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, _end)
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):  # an observer's starter lets it take Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends servers in order
    try:
        config = Config.from_env()
        os.environ.update(threads.variables(os.environ, config.role))  # before anything here imports torch
        entitle(config.role, config.rank_hint)
        allow_many_files()
        collect_seldom(config.num_workers)
        if config.role == "observer":
            with importing():
                from servers.observer.observer_process import run_observer

            return run_observer(os.environ)
        if config.role == "scheduler":
            with importing():
                from servers.scheduler_process import run_scheduler

            return run_scheduler(config.require_job("scheduler"), links(config)())
        role = config.role if config.role in ("aggregator", "standby") else "server"
        config = config.require_job(role)
        name = f"{role}-{config.rank_hint}" if config.rank_hint >= 0 else f"{role}-{_unique()}"
        if config.start > 1:  # one that has been given up, and is alive all the same, may have the other's place
            name += f".{config.start}"
        with importing():
            from kvstore.transport.shm.shared_memory import sharing  # brings numpy, which the scheduler does without

        make_transport, endpoint = sharing(links(config), config), server_endpoint(config, name)
        with importing():  # run_member imports it again, and would have the collector look at torch
            import_module("servers.aggregator.aggregator_process" if role == "aggregator" else "servers.server")
        return run_member(config, make_transport, endpoint)
    except NodeLost as exc:  # another process has failed before the job began
        if not hand_over(ExitReport(str(exc), consequence=True, cause=exc.cause), os.environ):
            print(exc, file=sys.stderr)
        return JOB_FAILED_EXIT
    except KVStoreError as exc:
        text = f"{type(exc).__name__}: {exc}"
        if not hand_over(ExitReport(text, details=f"{text}\n"), os.environ):
            print(text, file=sys.stderr)
        return 1


def _unique() -> str:
    import secrets

    return secrets.token_hex(4)


def _end(_signal: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    if _imports(frame):
        os._exit(TERMINATED)  # class bodies and libraries turn an exception into one of theirs
    raise SystemExit(TERMINATED)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported there."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    end_with(main)
