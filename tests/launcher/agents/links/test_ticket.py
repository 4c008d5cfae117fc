"""The ticket by which an agent finds launch.py."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import pair
from launcher.agents.links.ticket import ENLIST, AgentTicket

KEY = "k" * 40


def test_a_ticket_arrives_and_shows_no_secret() -> None:
    (server, _), (public, secret) = pair(), pair()
    ticket = AgentTicket("tcp://[fd00::1]:5555", server, public, secret)
    assert AgentTicket.parse(ticket.text) == ticket
    assert AgentTicket.parse(f"  {ticket.text}\n") == ticket
    assert secret not in repr(ticket)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        f"tcp://h:1 {KEY} {KEY}",
        f"tcp://h:1 {KEY} {KEY} hunter2",
        f"tcp://h:1 {KEY} {KEY} {KEY} hunter2",
        f"ipc://h {KEY} {KEY} {KEY}",
    ],
)
def test_what_is_no_ticket_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=ENLIST) as caught:
        AgentTicket.parse(text)
    assert "hunter2" not in str(caught.value)
