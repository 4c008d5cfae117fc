"""A fault to inject, as `--inject` has it: `kill:server:1@round:100`. No I/O."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import cast

from kvstore.job.contract import Member, Role, member_title
from launcher.errors import LaunchError

# What is done to a process. A stopped one is alive, and says nothing, until it is continued.
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
ROLES = ("scheduler", "server", "standby", "worker")

_FAULT = re.compile(r"(\w+):(\w+)(?::(\d{1,9}))?@(?:round:([1-9]\d{0,8})|(\d{1,9}(?:\.\d{1,9})?)s)", re.ASCII)
_VALID = "ACTION:ROLE:RANK@WHEN, such as kill:server:1@round:100, stop:standby:0@10s or kill:scheduler@5s"


@dataclass(frozen=True)
class Injection:
    """One fault.

    Args:
        role, rank: the member whose process it happens to.
        round: when that process has so many rounds; None for a time.
        after_s: when the job has run for so many seconds; None for a round.
    """

    action: str
    role: Role
    rank: int
    round: int | None = None
    after_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Read a fault."""
        match = _FAULT.fullmatch(text)
        if match is None:
            raise LaunchError(f"--inject {text}: expected {_VALID}")
        action, role, rank, rounds, seconds = match.groups()
        if action not in ACTIONS:
            raise LaunchError(f"--inject {text}: there is no action {action}; valid: {', '.join(ACTIONS)}")
        if role not in ROLES:
            raise LaunchError(f"--inject {text}: there is no role {role}; valid: {', '.join(ROLES)}")
        if (rank is None) != (role == "scheduler"):
            raise LaunchError(f"--inject {text}: a {role} has {'no' if rank else 'a'} rank; expected {_VALID}")
        if rounds is not None and (role not in ("server", "standby") or action == "cont"):
            why = "a stopped process sees no round" if action == "cont" else f"a {role} counts no rounds"
            raise LaunchError(f"--inject {text}: {why}; give a time, such as {action}:{role}{_with(rank)}@10s")
        return cls(
            action,
            cast(Role, role),
            int(rank or 0),
            None if rounds is None else int(rounds),
            None if seconds is None else float(seconds),
        )

    @property
    def member(self) -> Member:
        """The member whose process it happens to."""
        return self.role, self.rank

    @property
    def signal(self) -> signal.Signals:
        """What the process is sent."""
        return ACTIONS[self.action]

    def __str__(self) -> str:
        when = f"{self.after_s:g} s after the start" if self.round is None else f"at its round {self.round}"
        return f"{self.signal.name} for {member_title(self.role, self.rank)}, {when}"


def _with(rank: str | None) -> str:
    return "" if rank is None else f":{rank}"
