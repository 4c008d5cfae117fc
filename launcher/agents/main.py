"""The agent as a program: over its standard streams for ssh, or back to launch.py for what else has started it."""

from __future__ import annotations

import os
import sys

from kvstore.errors import KVStoreError
from kvstore.job.ranks import manager_rank
from launcher.agents.agent import Agent
from launcher.agents.links.link import AgentLink, PipeLink
from launcher.agents.links.ticket import ENLIST, AgentTicket
from launcher.supervision.signals import SignalQueue


def main() -> int:
    """Be an agent until the job is over; return 0, or 1 if it ended in another way."""
    with SignalQueue() as signals:
        try:
            ticket = os.environ.pop(ENLIST, None)  # a secret, and not for the tasks
            link = _over_pipes() if ticket is None else _back(ticket)
            return Agent(link, signals, -1 if ticket is None else manager_rank(os.environ)).run()
        except KVStoreError as error:
            print(f"the agent cannot start: {error}", file=sys.stderr)
            return 1


def _over_pipes() -> AgentLink:
    """A link over standard input and output. Whoever else writes to standard output means standard error."""
    link = PipeLink(os.dup(0), os.dup(1), greet=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return link


def _back(ticket: str) -> AgentLink:
    from launcher.agents.links.hub import BackLink  # brings ZeroMQ

    return BackLink(AgentTicket.parse(ticket))
