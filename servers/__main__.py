"""``python -m servers``: run the server or the scheduler, as ``DMLC_ROLE`` says."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

from kvstore.errors import KVStoreError
from kvstore.job import threads, uncaught
from kvstore.job.config import Config
from kvstore.job.exit_report import ExitReport, hand_over
from kvstore.job.processes import allow_many_files
from kvstore.transport.choose import links
from servers.endpoints import server_endpoint


def main() -> int:
    """Run until the job ends; return 0, ``JOB_FAILED_EXIT`` if the job failed, or 1 if this process did."""
    uncaught.install()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends servers in order
    try:
        config = Config.from_env()
        os.environ.update(threads.variables(os.environ, config.role))  # before anything here imports torch
        from servers.server import run_scheduler, run_server

        allow_many_files()
        if config.role == "scheduler":
            return run_scheduler(config.require_job("scheduler"), links(config)())
        config = config.require_job("server")
        name = f"server-{config.rank_hint}" if config.rank_hint >= 0 else f"server-{_unique()}"
        from kvstore.transport.shm.transport import sharing  # brings numpy, which the scheduler does without

        return run_server(config, sharing(links(config), config), server_endpoint(config, name))
    except KVStoreError as exc:
        text = f"{type(exc).__name__}: {exc}"
        if not hand_over(ExitReport(text, details=f"{text}\n"), os.environ):
            print(text, file=sys.stderr)
        return 1


def _unique() -> str:
    import secrets

    return secrets.token_hex(4)


def _end(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)
