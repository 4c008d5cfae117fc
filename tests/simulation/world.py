"""Virtual time: tasks run one at a time, in one thread, and time passes only while all of them wait.

A task is a greenlet. When it waits, the world goes on with the earliest event, and events of the same time come in the
order in which they were made. So a run with the same seed does the same, and its minutes take milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from greenlet import getcurrent, greenlet

Action: TypeAlias = Callable[[], None]

BEGIN = 1000.0  # seconds; a clock that begins at 0 hides who forgets to ask it
POLL_S = 0.01  # how often a task looks whether another has ended


class Killed(BaseException):
    """The process of this task has been killed: nothing of it runs any more."""


class Timer:
    """An event that can be canceled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class World:
    """See the module. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.current: Task | None = None
        self.hub = getcurrent()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def after(self, delay_s: float, action: Action) -> Timer:
        timer = Timer(action)
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), timer))
        return timer

    def run(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until ``over`` returns True; return whether it has within ``limit_s`` seconds."""
        until = self.now + limit_s
        while not over():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                timer.action()
        return True


class Task:
    """Something that runs in the world, with the methods of a ``threading.Thread`` that are used."""

    def __init__(self, world: World, target: Callable[[], Any], name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.result: Any = None
        self._world = world
        self._target = target
        self._greenlet = greenlet(self._run, parent=world.hub)
        self._began = self._over = False
        self._timer: Timer | None = None
        self._stopped = self._missed = False
        self._grads = True  # whether torch notes gradients, which each thread says for itself

    def start(self) -> None:
        self._timer = self._world.after(0.0, self._go_on)

    def is_alive(self) -> bool:
        return self._timer is not None and not self._over

    def join(self, timeout: float | None = None) -> None:
        caller = self._world.current
        assert caller is not None
        deadline = None if timeout is None else self._world.now + timeout
        while self.is_alive() and (deadline is None or self._world.now < deadline):
            caller.wait(POLL_S)

    def wait(self, timeout: float) -> None:
        """Let time pass until ``wake``, for at most ``timeout`` seconds. Only the task itself calls it."""
        if self._over:  # it has been killed, and is being unwound
            raise Killed
        self._timer = self._world.after(timeout, self._go_on)
        self._world.hub.switch()

    def wake(self) -> None:
        if self._timer is not None and self._timer.action is not None:
            self._timer.cancel()
            self._timer = self._world.after(0.0, self._go_on)

    def kill(self) -> None:
        """End it where it is. A task cannot kill itself."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._began:
            self._switch(lambda: self._greenlet.throw(Killed))

    def interrupt(self, error: BaseException) -> None:
        """Raise ``error`` in it where it waits, as a signal's handler does."""
        if self._began and not self._over and not self._stopped and self._timer is not None:
            self._timer.cancel()
            self._switch(lambda: self._greenlet.throw(error))

    def stop(self) -> None:
        """Let it do nothing until ``resume``, as if its process had been stopped."""
        self._stopped = True

    def resume(self) -> None:
        self._stopped = False
        if self._missed:
            self._missed = False
            self._timer = self._world.after(0.0, self._go_on)

    def _go_on(self) -> None:
        if self._stopped:
            self._missed = True
            return
        if self._timer is not None:
            self._timer.cancel()
        self._began = True
        self._switch(self._greenlet.switch)

    def _switch(self, how: Callable[[], Any]) -> None:
        self._world.current = self
        if not self._grads:
            torch.set_grad_enabled(False)
        try:
            how()
        finally:
            self._world.current = None
            self._grads = torch.is_grad_enabled()
            if not self._grads:
                torch.set_grad_enabled(True)

    def _run(self) -> None:
        try:
            self.result = self._target()
        except Killed:
            pass
        except BaseException as exc:
            self.error = exc
        finally:
            self._over = True
