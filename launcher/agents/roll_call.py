"""Before anything starts: every agent has answered, or one report says which have not and why."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence

from kvstore.wire import Message
from launcher.agents.links.protocol import Ping
from launcher.agents.remote import RemoteAgent
from launcher.errors import LaunchError
from launcher.supervision.crew import turn
from launcher.supervision.signals import CHILD, SignalQueue

_STEP_S = 0.1
_PING_S = 5.0


class Interrupted(Exception):
    """A signal has asked launch.py to end before the job began."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class RollCall:
    """Asks agents, all at once, and waits for the answers.

    Args:
        selector: what they are waited for with.
        signals: entered already.
    """

    def __init__(self, selector: selectors.BaseSelector, signals: SignalQueue) -> None:
        self._selector = selector
        self._signals = signals
        self._pinged = time.monotonic()
        self._problems: list[str] = []
        selector.register(signals, selectors.EVENT_READ)

    def leave(self) -> None:
        """Leave the signals to others."""
        self._selector.unregister(self._signals)

    def wait(self, done: Callable[[], bool], seconds: float, remotes: Callable[[], Sequence[RemoteAgent]]) -> bool:
        """Let messages come until `done`, or for so long; keep the agents patient meanwhile.

        Returns:
            Whether it is done.

        Raises:
            Interrupted: by a signal.
        """
        deadline = time.monotonic() + seconds
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= self._pinged + _PING_S:
                self._pinged = now
                for remote in remotes():
                    remote.send(Ping())
            turn(self._selector, min(_STEP_S, deadline - now))
            for signum in self._signals.take():
                if signum != CHILD:
                    raise Interrupted(signum)
        return True

    def ask(
        self,
        questions: Mapping[RemoteAgent, Message],
        kind: type[Message],
        seconds: float,
        problem: Callable[[RemoteAgent], str],
    ) -> list[RemoteAgent]:
        """Send each its question, and wait for an answer of a kind from every one.

        What is wrong is kept for `conclude`: the others are asked on, so that one report tells all.

        Args:
            questions: what to send to whom.
            kind: what they answer with.
            seconds: how long they may take.
            problem: what is wrong with an answer; nothing if it is fine.

        Returns:
            Those that are neither lost nor silent and have no problem.

        Raises:
            Interrupted: by a signal.
        """
        for remote, question in questions.items():
            remote.send(question)
        return self.expect(list(questions), kind, seconds, problem)

    def expect(
        self, remotes: Sequence[RemoteAgent], kind: type[Message], seconds: float, problem: Callable[[RemoteAgent], str]
    ) -> list[RemoteAgent]:
        """Wait for a message of a kind from every one; see `ask`."""
        self.wait(
            lambda: all(remote.lost is not None or remote.said(kind) is not None for remote in remotes),
            seconds,
            lambda: remotes,
        )
        fit = []
        for remote in remotes:
            if remote.lost is not None:
                self._problems.append(f"{remote.host}: {remote.lost}")
            elif remote.said(kind) is None:
                said = f"; it printed: {remote.explanation}" if remote.explanation else ""
                self._problems.append(f"{remote.host}: no answer within {seconds:g} s{said}")
            elif text := problem(remote):
                self._problems.append(f"{remote.host}: {text}")
            else:
                fit.append(remote)
        return fit

    def conclude(self, count: int) -> None:
        """Go on only if nothing was wrong with any of so many.

        Raises:
            LaunchError: a report with a line for each problem.
        """
        if self._problems:
            raise report(self._problems, count)


def report(lines: Sequence[str], count: int) -> LaunchError:
    """One error for many hosts."""
    text = "\n  ".join(line.replace("\n", "\n    ") for line in lines)
    return LaunchError(f"nothing was started; {len(lines)} of {count} hosts cannot take part:\n  {text}", exit_code=1)
