"""The page of a job: its address, which is known before anything starts, and the process that serves it."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job import processes
from kvstore.job.observing_place import FILE
from kvstore.job.page_address import lines, listen, token_of
from kvstore.job.settings import (
    DASHBOARD_FD,
    DASHBOARD_TOKEN,
    DASHBOARD_TOKEN_FILE,
    LIFELINE,
    OBSERVE,
    ROLE,
    TRACE,
    TRACE_FILE,
)
from kvstore.job.trace_target import TraceTarget
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.tasks import outside_a_job
from launcher.processes.companion import Companion, CompanionProgram

SHOWN_S = 2.0  # how long the page shows the end of a job
WRITTEN_S = 30.0  # how long the file of a trace may take to be written for the last time


@contextmanager
def companions(job: Job, directory: Path, environ: Mapping[str, str]) -> Iterator[list[Companion]]:
    """Have what runs beside a job: the observer, if it has anything to do; else nothing.

    Args:
        job: the job.
        directory: the job's private directory, with the file that tells observers where the job is.
        environ: the caller's environment.

    Raises:
        LaunchError: the page's port is not free, its token cannot be read, or the trace's file cannot be written.
    """
    told: dict[str, str] = {}
    pass_fds: tuple[int, ...] = ()
    announcement: list[str] = []
    with ExitStack() as stack:
        if job.cluster.dashboard is not None:
            listener = stack.enter_context(_listening(job.cluster.dashboard))
            token = _token(job.cluster.dashboard_token_file or DASHBOARD_TOKEN_FILE.read(environ))
            pass_fds = (listener.fileno(),)
            told |= {DASHBOARD_FD.name: str(listener.fileno()), DASHBOARD_TOKEN.name: token}
            announcement += lines(listener.getsockname()[1], token, environ)
        grace_s = SHOWN_S
        if job.cluster.trace is not None:
            target = _writable(job.cluster.trace)
            told |= {TRACE_FILE.name: str(target.file), TRACE.name: str(target.rounds)}
            grace_s = WRITTEN_S
        if not told:
            yield []
            return
        told |= {ROLE.name: "observer", OBSERVE.name: str(directory / FILE), LIFELINE.name: "1"}
        env = processes.complete({**outside_a_job(environ), **told}, processes.source_root())
        name = "trace" if job.cluster.dashboard is None else "dashboard"
        program = CompanionProgram(name, (*processes.words(sys.executable, "servers"), name), env, pass_fds, grace_s)
        yield [Companion(program, announcement)]


def _writable(trace: str) -> TraceTarget:
    """Make the file of the trace."""
    target = TraceTarget.parse(trace)
    try:
        target.prepare()
    except ConfigError as error:
        raise LaunchError(f"--trace: {error}", exit_code=1) from None
    return target


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    try:
        listener = listen(port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LaunchError(f"--dashboard={port}: cannot listen at 127.0.0.1:{port}: {why}", exit_code=1) from None
    with listener:
        yield listener


def _token(file: str) -> str:
    """A new token, or the one in a file."""
    if not file:
        return secrets.token_urlsafe(32)
    try:
        return token_of(Path(file))
    except ConfigError as error:
        raise LaunchError(f"--dashboard-token-file: {error}", exit_code=1) from None
