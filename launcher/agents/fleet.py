"""The agents of one job as launch.py sees them: programs that start them, each by itself, and as a crew of tasks."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvstore import wire
from kvstore.job.contract import Role
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.agents.links import protocol as p
from launcher.agents.links.link import AgentLink, PipeLink
from launcher.job.tasks import Task
from launcher.output.lines import Prefixer
from launcher.processes.child import Child, OutputPipe, Program
from launcher.supervision.crew import Crew, Sink, turn

_PING_S = 1.0
_AWAY_S = 2.0
_FAREWELL_S = 3.0
_CARRIER_S = 0.5  # when a link has ended, its carrier exits soon and says why
_LEAVING_S = 3.0
_STEP_S = 0.05
_SHORTEST_S = 2.0  # agents are pinged once a second


M = TypeVar("M", bound=wire.Message)


_REMEMBERED = 20  # lines
_POLL_S = 0.01
_GRACE_S = 1.0


class Carrier:
    """A program that runs from `open` on.

    The keeper does not know of it: it exits by itself when launch.py is gone.

    Args:
        name: its name in errors: "ssh to node1".
        linked: whether an agent answers on its standard streams. Otherwise what it prints is for people.
        source: the name to print before its lines; empty for the name of the agent's host.
    """

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], *, linked: bool, source: str = ""
    ) -> None:
        self.source = source
        self.name = name
        self.link: PipeLink | None = None
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._on_line: Callable[[str], None] | None = None
        read, write = os.pipe() if linked else (None, None)
        try:
            self._child = Child(Program(name, argv, env), stdin=read)
        except BaseException:
            if write is not None:
                os.close(write)
            raise
        finally:
            if read is not None:
                os.close(read)
        texts = [self._child.stderr]
        if write is not None:
            self.link = PipeLink(self._child.stdout, write)
        else:
            texts.append(self._child.stdout)
        self._pipes = [OutputPipe(source, Prefixer.into(self._say)) for source in texts]

    def open(self, selector: selectors.BaseSelector) -> None:
        for pipe in self._pipes:
            pipe.register(selector)
        self._child.execute()

    def relay(self, on_line: Callable[[str], None]) -> None:
        """Pass every line to `on_line` from now on, instead of keeping it for `explanation`."""
        self._on_line = on_line

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""
        return self._child.poll()

    def wait(self, seconds: float) -> Exit | None:
        """Wait for its exit, for so many seconds at most. Return how it ended; None if it has not."""
        deadline = time.monotonic() + seconds
        while (how := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for pipe in self._pipes:
            pipe.drain()
        return how

    @property
    def explanation(self) -> str:
        """The last lines that it has printed, if they were not relayed. Of a traceback, only the last line."""
        if self._on_line is not None:
            return ""
        lines = list(self._lines)
        for at, line in enumerate(lines):
            if line.startswith("Traceback ("):
                lines[at:] = lines[-1:]
                break
        return "\n".join(lines)

    def signal(self, signum: int) -> None:
        """Send a signal to it, and to the processes that it has started here."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signum)

    def close(self, patience: float = 0.0) -> None:
        """Wait so many seconds for its exit, then send SIGTERM, then SIGKILL. May be called again."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(patience if signum == signal.SIGTERM else _GRACE_S) is not None:
                break
            self.signal(signum)
        self.wait(_GRACE_S)
        if self.link is not None:
            self.link.close()
        for pipe in self._pipes:
            pipe.finish()
        self._child.reap()

    def _say(self, lines: bytes) -> None:
        for line in lines.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            self._lines.append(line.strip())
            if self._on_line is not None:
                self._on_line(line.rstrip())


class RemoteAgent:
    """One agent.

    `host`: the name of its host as the user has given it, or else as the agent has. `hint`: returns what the user can
    do about a message of the carrier; empty if unknown.
    """

    def __init__(
        self, host: str, link: AgentLink, carrier: Carrier | None = None, hint: Callable[[str], str] = lambda _: ""
    ) -> None:
        self.host = host
        self._hint = hint
        self.carrier = carrier
        self.lost: str | None = None
        self.left = False  # it has left in order
        self.code = 1
        self.heard = time.monotonic()
        self.members: list[tuple[Role, int]] = []
        self.indices: list[int] = []
        self.empty = False
        self.handler: Callable[[RemoteAgent, wire.Message], None] | None = None
        self.on_loss: Callable[[RemoteAgent], None] | None = None
        self._said: dict[type[wire.Message], wire.Message] = {}
        self._link = link

    def open(self, selector: selectors.BaseSelector) -> None:
        self._link.open(selector, self._take, self._end)

    def send(self, message: wire.Message) -> None:
        self._link.send(message)

    def said(self, kind: type[M]) -> M | None:
        message = self._said.get(kind)
        return message if isinstance(message, kind) else None

    def reading(self, wanted: bool) -> None:
        self._link.reading(wanted)
        self.heard = time.monotonic()

    def lose(self, why: str, code: int = 1) -> None:
        """Give it up. Its tasks count as ended with that exit code."""
        if self.lost is None:
            self._link.close()
            self.code = code
            self.lost = why
            if self.on_loss is not None:
                self.on_loss(self)

    def give_up(self, why: str) -> None:
        """Give up an agent that does not answer, and end its carrier, if only this agent uses it."""
        self.lose(why)
        if self.carrier is not None and self.carrier.link is not None:
            self.carrier.signal(signal.SIGTERM)

    @property
    def explanation(self) -> str:
        if self.carrier is None:
            return ""
        return self.carrier.explanation or (self.carrier.link.preamble if self.carrier.link else "")

    def close(self) -> None:
        """End the link without telling anybody."""
        self._link.close()

    def _take(self, message: wire.Message) -> None:
        self.heard = time.monotonic()
        if self.handler is not None:
            self.handler(self, message)
        else:
            self._said[type(message)] = message

    def _end(self, how: str) -> None:
        if self.carrier is not None:
            ended = self.carrier.wait(_CARRIER_S)
            if ended is not None:
                how = f"{self.carrier.name} {ended}"
            if said := self.explanation:
                how += f": {said}"
            if hint := self._hint(said or how):
                how += f"\n({hint})"
        self.lose(how)


class Fleet(Crew):
    """Runs tasks through agents.

    Args:
        remotes: agents that have said hello, each with the indices of its tasks.
        starts: the tasks to start, for each agent.
        limit_s: how long an agent may be silent before it is lost, in seconds.
        move: gives a task from one agent to another, with variables beside what it had; returns what to tell the other.
        worker: gives an agent the task of one more worker, by index and rank; returns it, and what to tell the agent.
            None if none is added.
    """

    def __init__(
        self,
        remotes: Sequence[RemoteAgent],
        starts: dict[RemoteAgent, p.StartTasks],
        limit_s: float,
        move: Callable[[int, RemoteAgent, RemoteAgent, Mapping[str, str]], p.StartTasks] | None = None,
        worker: Callable[[int, int, RemoteAgent], tuple[Task, p.StartTasks]] | None = None,
    ) -> None:
        self._remotes = remotes
        self._move, self._worker = move, worker
        self._added: dict[int, tuple[RemoteAgent, p.StartTasks]] = {}  # what to tell whom, by index
        self._starts = starts
        self._limit_s = max(_SHORTEST_S, limit_s)
        self._running = {index for remote in remotes for index in remote.indices}
        self._pinged = self._collected = 0.0
        self._gone: dict[Carrier, float] = {}
        self._leaving: dict[RemoteAgent, tuple[float, str]] = {}
        self._closed = False

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self._selector, self._sink = selector, sink
        for remote in self._remotes:
            remote.handler, remote.on_loss = self._take, self._lost
            remote.heard = time.monotonic()  # it may have waited for other hosts
            if remote.carrier is not None:
                remote.carrier.relay(partial(self._relay, remote.carrier.source or remote.host))
        for remote in self._remotes:
            if remote.lost is None:
                remote.send(self._starts[remote])
            else:
                self._lost(remote)

    def can_restart(self, index: int) -> bool:
        return self._able(index) is not None

    def hosts(self) -> list[str]:
        return list(dict.fromkeys(remote.host for remote in self._remotes if self._is_able(remote)))

    def restart(self, index: int, variables: Mapping[str, str], host: str = "") -> None:
        remote = self._able(index)
        other = next((other for other in self._remotes if other.host == host and self._is_able(other)), None)
        if remote is not None and other is not None and other.host != remote.host and self._move is not None:
            other.empty = False
            self._running.add(index)
            other.send(self._move(index, remote, other, variables))
        elif remote is not None:
            remote.empty = False
            self._running.add(index)
            remote.send(p.StartAgain(index, p.pack(variables)))

    def more(self, index: int, rank: int, host: str = "") -> Task | None:
        able = [remote for remote in self._remotes if self._is_able(remote) and host in ("", remote.host)]
        if self._worker is None or not able:
            return None
        # Where workers are, if there are such hosts: others are for servers.
        counts = [sum(role == "worker" for role, _ in remote.members) for remote in able]
        remote = able[counts.index(min(filter(None, counts), default=0))]
        task, told = self._worker(index, rank, remote)
        self._added[index] = remote, told
        return task

    def take(self, index: int, task: Task) -> None:
        remote, told = self._added.pop(index)
        remote.empty = False
        self._running.add(index)
        remote.send(told)

    def _able(self, index: int) -> RemoteAgent | None:
        return next((remote for remote in self._remotes if self._is_able(remote) and index in remote.indices), None)

    def _is_able(self, remote: RemoteAgent) -> bool:
        return remote.lost is None and remote not in self._leaving

    def collect(self) -> None:
        now = time.monotonic()
        if now > self._collected + _AWAY_S:
            # This process was stopped. What the agents have sent meanwhile is still to be read.
            for remote in self._remotes:
                remote.heard = now
        self._collected = now
        asks = now >= self._pinged + _PING_S
        if asks:
            self._pinged = now
        # The agent that has been silent for longest is the likeliest cause of the end of the others.
        for remote in sorted(self._remotes, key=lambda remote: remote.heard):
            if remote.lost is None:
                if asks:
                    remote.send(p.Ping())
                self._look_after(remote, now)

    def _look_after(self, remote: RemoteAgent, now: float) -> None:
        if now - remote.heard > self._limit_s:
            remote.give_up(f"it was silent for {self._limit_s:g} s")
        elif remote.carrier is not None and (how := remote.carrier.poll()) is not None:
            # What has arrived over its link before its end comes first.
            since = self._gone.setdefault(remote.carrier, now)
            if now > since + _CARRIER_S:
                said = remote.carrier.explanation
                remote.lose(f"{remote.carrier.name} {how}" + (f": {said}" if said else ""), how.status or 1)
        elif remote in self._leaving and now > self._leaving[remote][0] + _LEAVING_S:
            remote.lose(self._leaving[remote][1])

    def reading(self, wanted: bool) -> None:
        for remote in self._remotes:
            remote.reading(wanted)

    def signal(self, signum: int) -> None:
        for remote in self._remotes:
            remote.send(p.Signal(signum))

    def signal_task(self, index: int, signum: int) -> bool:
        remote = self._able(index)
        if remote is None or index not in self._running:
            return False
        remote.send(p.SignalTask(index, signum))
        return True

    def leftovers(self) -> bool:
        return any(not remote.empty and remote.lost is None for remote in self._remotes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for remote in self._remotes:
            remote.send(p.Bye())
        deadline = time.monotonic() + _FAREWELL_S
        while any(r.lost is None and r not in self._leaving for r in self._remotes) and time.monotonic() < deadline:
            turn(self._selector, _STEP_S)
        for remote in self._remotes:
            remote.close()

    def _relay(self, host: str, line: str) -> None:
        self._sink.say(f"{host}: {line}")

    def _take(self, remote: RemoteAgent, message: wire.Message) -> None:
        if isinstance(message, p.Output):
            if message.index in remote.indices:
                self._sink.output(message.index, message.number, b"".join(bytes(part) for part in message.buffers))
        elif isinstance(message, p.Reported):
            if message.index in remote.indices:
                texts = message.error, message.place, message.details
                report = ExitReport(*texts, message.consequence, message.printed, message.cause, message.given_up)
                self._sink.reported(message.index, report)
        elif isinstance(message, p.Exited):
            self._exited(remote, message.index, Exit(message.code, message.signum))
        elif isinstance(message, p.Empty):
            remote.empty = True
        elif isinstance(message, p.Note):
            self._sink.say(f"{remote.host}: {message.text}")
        elif isinstance(message, p.Bye):
            remote.left = not message.why
            why = "its agent ended" + (f": {message.why}" if message.why else "")
            shared = remote.carrier is not None and any(
                other.carrier is remote.carrier for other in self._remotes if other is not remote
            )
            if shared and message.why and not self._closed:
                # The carrier ends all of its agents when one fails, and then exits and says so.
                self._leaving[remote] = (time.monotonic(), why)
                remote.empty = True
            else:
                remote.lose(why)
        elif isinstance(message, p.Refused):
            self._fail(remote, Exit(code=message.code or 1, text=f"was not started: {message.text}"))

    def _lost(self, remote: RemoteAgent) -> None:
        if not self._closed:
            self._fail(remote, Exit(code=remote.code, text=f"was lost: {remote.lost}"))

    def _fail(self, remote: RemoteAgent, how: Exit) -> None:
        remote.empty = True
        for index in remote.indices:
            self._exited(remote, index, how)

    def _exited(self, remote: RemoteAgent, index: int, how: Exit) -> None:
        if index in remote.indices and index in self._running:
            self._running.discard(index)
            for number in (1, 2):
                self._sink.output(index, number, b"")
            self._sink.exited(index, how)
