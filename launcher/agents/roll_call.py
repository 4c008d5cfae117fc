"""Asks all agents at once before a job, and judges the answers. One report has everything that is wrong with them."""

from __future__ import annotations

import ipaddress
import selectors
import time
from collections.abc import Callable, Mapping, Sequence

import kvstore
from kvstore import wire
from kvstore.job.address import Address
from launcher.agents.fleet import RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.links.protocol import Ping
from launcher.errors import LaunchError
from launcher.supervision.crew import CHILD, SignalQueue, turn

_STEP_S = 0.1
_PING_S = 5.0


class Interrupted(Exception):
    """A signal has asked launch.py to exit before the job has begun."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class RollCall:
    """Asks all agents at once, and waits for the answers.

    Args:
        selector: the selector that their links use.
        signals: the signals, already entered.
    """

    def __init__(self, selector: selectors.BaseSelector, signals: SignalQueue) -> None:
        self._selector = selector
        self._signals = signals
        self._pinged = time.monotonic()
        self._problems: list[str] = []
        selector.register(signals, selectors.EVENT_READ)

    def leave(self) -> None:
        self._selector.unregister(self._signals)

    def wait(self, done: Callable[[], bool], seconds: float, remotes: Callable[[], Sequence[RemoteAgent]]) -> bool:
        """Process messages until `done`, for so many seconds at most. Ping the agents meanwhile, so that they wait.

        Returns whether it is done. Raises Interrupted: a signal has come.
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
        questions: Mapping[RemoteAgent, wire.Message],
        kind: type[wire.Message],
        seconds: float,
        problem: Callable[[RemoteAgent], str],
    ) -> list[RemoteAgent]:
        """Send a question to each agent, and wait for all answers. Return the agents with which nothing is wrong.

        Problems are kept for `conclude`. The other agents are asked on, so that one report has everything.

        Args:
            kind: the type of the answers.
            problem: returns what is wrong with an agent's answer; empty if nothing is.
        """
        for remote, question in questions.items():
            remote.send(question)
        return self.expect(list(questions), kind, seconds, problem)

    def expect(
        self,
        remotes: Sequence[RemoteAgent],
        kind: type[wire.Message],
        seconds: float,
        problem: Callable[[RemoteAgent], str],
    ) -> list[RemoteAgent]:
        """Wait for a message of a type from each agent; see `ask`."""
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
        if self._problems:
            raise report(self._problems, count)


def report(lines: Sequence[str], count: int) -> LaunchError:
    text = "\n  ".join(line.replace("\n", "\n    ") for line in lines)
    return LaunchError(f"nothing was started; {len(lines)} of {count} hosts cannot take part:\n  {text}", exit_code=1)


def version_problem(remote: RemoteAgent) -> str:
    mine, hello = kvstore.__version__, remote.said(p.Hello)
    if hello is None or hello.version == mine:
        return ""
    return f"has torch-kvstore {hello.version} (Python {hello.python}), but this machine has {mine}; install the same"


def surveyed(remote: RemoteAgent) -> p.Surveyed:
    """What a host has answered, when it was asked for its address."""
    answer = remote.said(p.Surveyed)
    assert answer is not None  # noqa: S101 (all have been asked)
    return answer


def unfit(remote: RemoteAgent) -> str:
    """What is wrong with a host. Its address is checked, because other agents will get it."""
    answer = surveyed(remote)
    if answer.problem:
        return answer.problem
    try:
        ipaddress.ip_address(answer.address)
    except ValueError:
        return f"reports the address {answer.address!r}, which is not an IP address"
    return "" if answer.port else "its agent does not listen"


def addresses_chosen(own: Address, remotes: Sequence[RemoteAgent]) -> list[str]:
    """If hosts have several networks: which address was chosen, and why, for this machine and for each of them."""
    by_host = {remote.host: surveyed(remote) for remote in remotes}
    others = {host: answer for host, answer in by_host.items() if answer.address != own.ip}
    lines = [f"this machine is reached at {own.ip}: {own.why}"] if others and own.others else []
    several = ((host, answer) for host, answer in others.items() if answer.several)
    return [*lines, *(f"{host} is reached at {answer.address}: {answer.why}" for host, answer in several)]


def has_servers(remote: RemoteAgent) -> bool:
    """Whether other hosts must reach it, because servers run there."""
    return any(role in ("server", "standby") for role, _ in remote.members)


def unreached(remote: RemoteAgent) -> str:
    """Which hosts it cannot reach; empty if it reaches all."""
    probed = remote.said(p.Probed)
    if probed is None or not probed.failures:
        return ""
    where = ", ".join(f"{name} ({why})" for name, why in probed.failures)
    return f"cannot reach {where}; name the network that all share with --interface, or this machine's --host-ip"
