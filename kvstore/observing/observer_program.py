"""The observer that ``kvstore-status`` becomes to serve a page or to write a trace: its words and its environment.

The observer is in ``servers``, which this package may not import. So it is executed in place of the command: Ctrl-C and
signals reach it, and its exit code is the command's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from kvstore.job import processes
from kvstore.job.place import ObservingPlace
from kvstore.job.settings import DASHBOARD_FD, DASHBOARD_TOKEN, LIFELINE, OBSERVE, ROLE, TRACE, TRACE_FILE
from kvstore.job.trace_target import TraceTarget

_OURS = (LIFELINE, TRACE_FILE, TRACE, DASHBOARD_FD, DASHBOARD_TOKEN)


@dataclass(frozen=True)
class PreparedPage:
    """The page's socket, which listens, and its token."""

    listener: socket.socket
    token: str = field(repr=False)


@dataclass(frozen=True)
class ObserverProgram:
    """See the module.

    Args:
        place: where the job is.
        page: the page to serve; None for none.
        trace: the trace to write; None for none.
    """

    place: ObservingPlace
    page: PreparedPage | None = None
    trace: TraceTarget | None = None

    def variables(self, env: Mapping[str, str], place_file: str) -> dict[str, str]:
        """Return the environment of the observer.

        Args:
            env: of this process.
            place_file: a file with ``place``.
        """
        ours = {setting.name for setting in _OURS}
        told = {name: text for name, text in env.items() if not name.startswith("DMLC_") and name not in ours}
        told |= {ROLE.name: "observer", OBSERVE.name: place_file}
        if self.page is not None:
            told |= {DASHBOARD_FD.name: f"{self.page.listener.fileno()}", DASHBOARD_TOKEN.name: self.page.token}
        if self.trace is not None:
            told |= {TRACE_FILE.name: str(self.trace.file), TRACE.name: str(self.trace.rounds)}
        return processes.complete(told, processes.source_root())

    def execute(self, env: Mapping[str, str]) -> NoReturn:
        """Become the observer."""
        memory = os.memfd_create("observe.json", 0)  # the key in it is never in a file, and goes with the process
        os.fchmod(memory, 0o600)
        os.write(memory, json.dumps(self.place.described()).encode())
        if self.page is not None:
            self.page.listener.set_inheritable(True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the observer takes it
        words = processes.words(sys.executable, "servers")
        os.execve(words[0], words, self.variables(env, f"/proc/self/fd/{memory}"))  # noqa: S606 (no shell)
