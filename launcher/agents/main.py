"""An agent: runs the tasks of one host as launch.py tells it to, and leaves no process behind.

It ends its tasks when launch.py says so, when the link ends, when launch.py is silent for too long, and when it gets a
signal. If it is killed, its keeper ends them. Its link is its standard streams under ssh, or a connection to launch.py
otherwise.

The path of this module is the same in all versions: launch.py of another version starts this agent by it, hears which
version it has, and says so.
"""

from __future__ import annotations

import os
import platform
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import kvstore
from kvstore import wire
from kvstore.errors import KVStoreError, WireError
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit, source_root
from kvstore.job.ranks import manager_rank
from kvstore.job.system import cores
from launcher.agents.links import protocol as p
from launcher.agents.links.link import ENLIST, AgentLink, AgentTicket, PipeLink
from launcher.errors import LaunchError
from launcher.hosts import reach
from launcher.job.command import argv_of
from launcher.job.tasks import AGENT, HostEnvironment, Task, environment, our_servers
from launcher.processes.child import Program, require_command
from launcher.processes.children import Children
from launcher.processes.guard import Guard
from launcher.processes.jobdir import JobDir
from launcher.processes.keeper import remove_shared
from launcher.processes.machine import require_files
from launcher.supervision.crew import CHILD, SignalQueue, turn

_TICK_S = 0.5
_POLL_S = 0.05
_HIGH_WATER = 1 << 20
_PROBE_S = 4.0
_GRACE_S = 2.0
_LONGEST = 4096
_FAREWELL_S = 1.0
PATIENCE_S = 120.0  # before the job begins: launch.py may wait for other agents


class Agent:
    """One agent. The signals have been entered.

    `rank`: its number among the agents that a manager has started; -1 if the manager does not number them.
    """

    def __init__(self, link: AgentLink, signals: SignalQueue, rank: int = -1) -> None:
        self._link = link
        self._signals = signals
        self._rank = rank
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._heard = time.monotonic()
        self._limit_s = PATIENCE_S
        self._why: str | None = None  # why it ends its tasks and exits by itself
        self._dismissed = False
        self._crew: Children | None = None
        self._running: set[int] = set()
        self._told_empty = False
        self._reading = True
        self._job: str | None = None
        self._listener: socket.socket | None = None
        self._guard: Guard | None = None
        self._directory: JobDir | None = None

    def run(self) -> int:
        """Serve until the job is over. Returns 0 if launch.py has dismissed it, 1 if it ends by itself."""
        self._link.open(self._selector, self._take, self._lost)
        reached_at = os.environ.get("SSH_CONNECTION", "").split()
        self._link.send(
            p.Hello(
                kvstore.__version__,
                platform.python_version(),
                socket.gethostname(),
                self._rank,
                reached_at[2] if len(reached_at) == 4 else "",
            )
        )
        try:
            while not self._dismissed and self._why is None:
                self._step()
            if self._why is not None:
                self._end_tasks()
        finally:
            self._clean_up()
        return 0 if self._dismissed else 1

    # ---- the sink of its crew

    def output(self, index: int, number: int, data: bytes) -> None:
        self._link.send(p.Output(index, number, [data]))

    def reported(self, index: int, report: ExitReport) -> None:
        self._link.send(p.Reported(index, **asdict(report)))

    def exited(self, index: int, how: Exit) -> None:
        """Pass it on, unless the agent itself ends its tasks. Then it reports that instead."""
        self._running.discard(index)
        if self._why is None:
            self._link.send(p.Exited(index, how.code, how.signum))

    def say(self, text: str, *, secret: bool = False) -> None:
        self._link.send(p.Note(_readable(text)))

    # ---- the loop

    def _step(self) -> None:
        started = self._crew is not None
        waiting = started and not self._running and not self._told_empty
        turn(self._selector, _POLL_S if waiting else _TICK_S)
        self._link.poll()
        received = self._signals.take()
        asked = [signum for signum in received if signum != CHILD]
        if asked and self._why is None:
            self._why = f"it was sent {signal.Signals(asked[0]).name}"
        if self._crew is not None:
            self._crew.collect()
            reading = self._link.pending < _HIGH_WATER
            if reading != self._reading:
                self._reading = reading
                self._crew.reading(reading)
            if not self._running and not self._told_empty and not self._crew.leftovers():
                self._told_empty = True
                self._link.send(p.Empty())
        if time.monotonic() - self._heard > self._limit_s and self._why is None:
            self._why = f"launch.py had been silent for {self._limit_s:g} s, as if stopped, or cut off"

    def _take(self, message: wire.Message) -> None:
        self._heard = time.monotonic()
        if isinstance(message, p.Ping):
            self._link.send(p.Pong())
        elif isinstance(message, p.Survey):
            self._link.send(self._survey(message))
        elif isinstance(message, p.Probe):
            targets = [(str(name), str(address), int(port)) for name, address, port in message.targets]
            failures = reach.unreachable(targets, _PROBE_S)
            self._link.send(p.Probed([list(failure) for failure in failures]))
        elif isinstance(message, p.StartTasks):
            if self._crew is None:
                self._start(message)
            else:
                self._start_more(self._crew, message)
        elif isinstance(message, p.StartAgain):
            if self._crew is not None and self._crew.can_restart(message.index) and message.index not in self._running:
                self._running.add(message.index)
                self._told_empty = False
                self._crew.restart(message.index, p.unpack(message.variables))
        elif isinstance(message, p.Signal):
            if self._crew is not None:
                self._crew.signal(message.signum)
        elif isinstance(message, p.SignalTask):
            if self._crew is not None:
                self._crew.signal_task(message.index, message.signum)
        elif isinstance(message, p.Bye):
            self._dismissed = True

    def _lost(self, how: str) -> None:
        self._why = f"the link to launch.py ended: {how}"

    # ---- before the job

    def _survey(self, asked: p.Survey) -> p.Surveyed:
        try:
            chosen = reach.address(interface=asked.interface, toward=asked.toward)
            self._listener = reach.listener(chosen.ip)
            _require_directory(Path(os.fsdecode(asked.directory)), asked.create)
            if asked.command:
                argv = argv_of([os.fsdecode(word) for word in asked.command], sys.executable)
                require_command(Program("the command", argv, {}), os.fsdecode(asked.directory))
        except LaunchError as error:
            return p.Surveyed("", "", False, 0, _readable(str(error)))
        except OSError as error:
            return p.Surveyed("", "", False, 0, f"cannot listen at {chosen.ip}: {error.strerror}")
        port = self._listener.getsockname()[1]
        return p.Surveyed(chosen.ip, chosen.why, bool(chosen.others), port, "")

    # ---- the job

    def _start(self, start: p.StartTasks) -> None:
        if self._listener is not None:
            self._listener.close()
        self._limit_s = max(2.0, start.limit_s)
        self._job = start.mark
        try:
            require_files(2 * len(start.tasks))
            os.chdir(start.directory)
            self._directory = JobDir.make()
            self._guard = Guard(self._directory.path, self._directory.path.name, variable=AGENT, job=self._job)
            tasks = self._tasks(start)
            self._running = set(tasks)
            self._crew = Children(tasks, self._guard)
            self._crew.start(self._selector, self)
        except LaunchError as error:
            self._refuse(str(error), error.exit_code)
        except (OSError, WireError) as error:
            self._refuse(f"cannot start here: {error}", 1)
        else:
            self._link.send(p.Started())

    def _start_more(self, crew: Children, start: p.StartTasks) -> None:
        """Start tasks that have run on other hosts until now."""
        try:
            tasks = self._tasks(start)
        except (LaunchError, OSError, WireError) as error:  # what runs here goes on
            self.say(f"cannot start more here: {error}")
            for index, *_ in start.tasks:
                self.exited(index, Exit(1))
            return
        for index, task in tasks.items():
            if index not in self._running:
                self._running.add(index)
                self._told_empty = False
                crew.take(index, task)

    def _refuse(self, text: str, code: int) -> None:
        """End what has started, and report that no task runs."""
        if self._crew is not None:
            self._crew.close()
        self._running.clear()
        self._link.send(p.Refused(_readable(text), code))

    def _tasks(self, start: p.StartTasks) -> dict[int, Task]:
        assert self._directory is not None  # noqa: S101 (for the type checker)
        directory = self._directory
        around = HostEnvironment(
            environ=os.environ,
            python=sys.executable,
            cores=cores(),
            shims=str(directory.shims(sys.executable)),
            source_root=source_root(),
        )
        command = [os.fsdecode(word) for word in start.command]
        server_argv = tuple(os.fsdecode(word) for word in start.server_argv)
        # If the manager has given this agent cores of its own, they are divided already.
        divided = self._rank >= 0 and around.cores < (os.cpu_count() or 1)
        tasks = {}
        for index, role, rank, siblings, flat in start.tasks:
            variables = {**p.unpack(flat), AGENT: directory.path.name}
            env = environment(around, role, 1 if divided else siblings, variables, start.gpus)
            ours = server_argv or our_servers(sys.executable, role, rank)
            argv = argv_of(command, sys.executable) if role == "worker" else ours
            tasks[index] = Task(role, rank, argv, env)
        return tasks

    # ---- the end

    def _end_tasks(self) -> None:
        """Send SIGTERM to all tasks, and wait. The clean-up kills those that remain."""
        if self._crew is None:
            return
        self._crew.signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while (self._running or self._crew.leftovers()) and time.monotonic() < deadline and not self._dismissed:
            turn(self._selector, _POLL_S)
            self._link.poll()
            self._signals.take()
            self._crew.collect()

    def _clean_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._crew is not None:
            self._crew.close()
        self._link.send(p.Bye(self._why or ""))
        deadline = time.monotonic() + _FAREWELL_S
        while self._link.unsent > 0 and time.monotonic() < deadline:
            turn(self._selector, _POLL_S)
        self._link.close()
        if self._directory is not None:
            self._directory.remove()
        if self._job is not None:
            with suppress(OSError):
                remove_shared(self._job)
        if self._guard is not None:
            self._guard.dismiss()


def _readable(text: str) -> str:
    """A text as a message can carry it. Paths may hold bytes that are not text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")[:_LONGEST]


def _require_directory(path: Path, create: bool) -> None:
    if create:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot make the directory {path}: {error.strerror}") from None
    if not path.is_dir():
        raise LaunchError(f"there is no directory {path}; --sync-dst-dir copies the working directory")


def main() -> int:
    with SignalQueue() as signals:
        try:
            ticket = os.environ.pop(ENLIST, None)  # a secret, which tasks must not see
            link = _over_pipes() if ticket is None else _back(ticket)
            return Agent(link, signals, -1 if ticket is None else manager_rank(os.environ)).run()
        except KVStoreError as error:
            print(f"the agent cannot start: {error}", file=sys.stderr)
            return 1


def _over_pipes() -> AgentLink:
    """A link over standard input and output. What other code prints goes to standard error."""
    link = PipeLink(os.dup(0), os.dup(1), greet=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return link


def _back(ticket: str) -> AgentLink:
    from launcher.agents.links.hub import BackLink  # imports ZeroMQ

    return BackLink(AgentTicket.parse(ticket))
