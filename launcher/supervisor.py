"""The loop around a job's processes: starts them, passes their output on, and ends them as `Ending` says."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher.child import Child
from launcher.ending import Action, Ending, Kill, Limits, Say, Tell
from launcher.guard import Guard
from launcher.output import Outlet, Prefixer, prefix, wants_colour
from launcher.signals import CHILD, SignalQueue
from launcher.tasks import Task

# Called when a process has failed, with how ("exited with code 7"), while the others still run.
OnFailure = Callable[[Task, str], None]

_READ = 1 << 16
_PIPE_HOLDS = 1 << 20  # at most, by Linux's default limit
_HIGH_WATER = 4 << 20
_POLL_S = 0.02
_CHECK_S = 1.0
_FLUSH_S = 1.0


@dataclass
class _Stream:
    """One pipe of one child."""

    source: int
    target: int
    lines: Prefixer
    closed: bool = False


class Supervisor:
    """Runs the tasks of one job on this machine.

    Args:
        tasks: what to run, in this order.
        guard: sends signals to them, and kills them if launch.py dies.
        signals: entered already.
        on_failure: told of the first failure, once. It is called in the loop, so it must return soon.
        pass_fds: file descriptors for some of the tasks, by index.
        environ: the caller's environment, for NO_COLOR.
        limits: how long an ending may take.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        guard: Guard,
        signals: SignalQueue,
        on_failure: OnFailure,
        *,
        pass_fds: Mapping[int, tuple[int, ...]],
        environ: Mapping[str, str],
        limits: Limits | None = None,
    ) -> None:
        self._tasks = tasks
        self._guard = guard
        self._signals = signals
        self._on_failure = on_failure
        self._pass_fds = pass_fds
        self._ending = Ending(tasks, limits)
        self._outlet = Outlet()
        self._colour = {fd: wants_colour(fd, environ) for fd in (self._outlet.stdout, self._outlet.stderr)}
        self._children: list[Child] = []
        self._streams: list[tuple[_Stream, _Stream]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._reading = True
        self._waiting_for: int | None = None
        self._hurry = False  # a signal has asked us to end: output that nobody takes is given up soon
        self._muted = False  # standard output has failed

    def start(self) -> None:
        """Start every task.

        Raises:
            LaunchError: one cannot be started. Those before it run until `close`.
        """
        for index, task in enumerate(self._tasks):
            child = Child(task, self._guard.announce, self._pass_fds.get(index, ()))
            self._guard.add(child.pid)
            self._children.append(child)
            pair = (self._stream(index, child.stdout, 1), self._stream(index, child.stderr, 2))
            self._streams.append(pair)

    def run(self) -> int:
        """Follow the job to its end.

        Returns:
            The exit code for launch.py.
        """
        while True:
            self._perform(self._ending.tick(time.monotonic(), self._guard.leftovers))
            self._outlet.pump()
            if self._ending.over:
                return self._ending.exit_code
            self._balance()
            self._wait()

    def close(self) -> None:
        """Kill what is left, and print what it had said."""
        self._guard.kill()
        for child, streams in zip(self._children, self._streams, strict=True):
            child.reap()
            for stream in streams:
                self._drain(stream)
                self._finish(stream)
        self._flush()
        self._selector.close()

    def _wait(self) -> None:
        ready = self._selector.select(self._timeout())
        for key, _ in ready:
            if isinstance(key.data, _Stream):
                self._read(key.data)
        received = self._signals.take()
        for signum in received:
            if signum != CHILD:
                self._hurry = True
                self._perform(self._ending.signalled(signum, time.monotonic()))
        # Without an event too: should a SIGCHLD get lost, the job must not hang.
        if CHILD in received or not ready:
            self._collect()

    def _timeout(self) -> float:
        if self._ending.all_exited:
            return _POLL_S
        deadline = self._ending.deadline
        return _CHECK_S if deadline is None else min(_CHECK_S, max(0.0, deadline - time.monotonic()))

    def _collect(self) -> None:
        if (note := self._guard.recheck()) is not None:
            self._say(note)
        for index, child in enumerate(self._children):
            if child.exit is None and (how := child.poll()) is not None:
                for stream in self._streams[index]:
                    self._drain(stream)  # its last words come before ours about it
                self._perform(self._ending.exited(index, how, time.monotonic()))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._say(action.text)
            elif isinstance(action, Kill):
                self._guard.signal(action.signum)
            elif isinstance(action, Tell):
                self._outlet.pump()
                try:
                    self._on_failure(action.task, action.how)
                except Exception as error:
                    self._say(f"could not tell the others that {action.task.name} {action.how}: {error}")

    def _say(self, text: str) -> None:
        self._outlet.put(self._outlet.stderr, f"launch.py: {text}\n".encode(errors="surrogateescape"))

    def _stream(self, index: int, source: int, number: int) -> _Stream:
        target = self._outlet.stdout if number == 1 else self._outlet.stderr
        stream = _Stream(source, target, Prefixer(prefix(self._tasks[index].name, index, self._colour[target])))
        self._selector.register(source, selectors.EVENT_READ, stream)
        return stream

    def _read(self, stream: _Stream) -> int:
        """Take what one pipe holds, up to a limit.

        Returns:
            How much that was; 0 also if there will be no more.
        """
        if stream.closed:
            return 0
        try:
            data = os.read(stream.source, _READ)
        except BlockingIOError:
            return 0
        self._outlet.put(stream.target, stream.lines.feed(data))
        if not data:
            self._finish(stream)
        return len(data)

    def _drain(self, stream: _Stream) -> None:
        """Read all that was in a pipe when its process exited; a grandchild may be filling it still, without end."""
        total = 0
        while total <= _PIPE_HOLDS and (count := self._read(stream)):
            total += count

    def _finish(self, stream: _Stream) -> None:
        if stream.closed:
            return
        stream.closed = True
        self._outlet.put(stream.target, stream.lines.finish())
        if self._reading:
            self._selector.unregister(stream.source)
        os.close(stream.source)

    def _balance(self) -> None:
        """Read from the processes only as fast as our own output is taken; see to it that we are told when it is."""
        reading = self._outlet.pending < _HIGH_WATER
        if reading != self._reading:
            self._reading = reading
            for stream in (one for pair in self._streams for one in pair if not one.closed):
                if reading:
                    self._selector.register(stream.source, selectors.EVENT_READ, stream)
                else:
                    self._selector.unregister(stream.source)
        if self._outlet.waits_for != self._waiting_for:
            if self._waiting_for is not None:
                self._selector.unregister(self._waiting_for)
            self._waiting_for = self._outlet.waits_for
            if self._waiting_for is not None:
                self._selector.register(self._waiting_for, selectors.EVENT_WRITE)
        self._give_up_on_broken_output()

    def _give_up_on_broken_output(self) -> None:
        """Nobody reads standard output any more (`| head`): end as a program that writes there itself would."""
        error = self._outlet.broken.get(self._outlet.stdout)
        if error is not None and not self._muted:
            self._muted = True
            if isinstance(error, BrokenPipeError):
                self._perform(self._ending.signalled(signal.SIGPIPE, time.monotonic()))
            else:
                self._say(f"cannot write to standard output: {error.strerror}; the job goes on without it")

    def _flush(self) -> None:
        """Write out the rest. A slow reader is waited for, unless a signal has told us to end."""
        deadline = time.monotonic() + _FLUSH_S
        while True:
            self._outlet.pump()
            if self._outlet.waits_for is None or (self._hurry and time.monotonic() > deadline):
                return
            self._balance()
            self._selector.select(_POLL_S)
            if any(signum != CHILD for signum in self._signals.take()):
                self._hurry = True
