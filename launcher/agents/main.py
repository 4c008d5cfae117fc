"""The entry point of an agent. Its link is its standard streams under ssh, or a connection to launch.py otherwise."""

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
    """Run an agent until the job is over. Return 0, or 1 if it has ended by itself."""
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
