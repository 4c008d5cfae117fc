"""An agent as launch.py sees it: the link is a list, and the clock is a number."""

from __future__ import annotations

from agent_doubles import HELLO, Bringer, Clock, remote

from kvstore.job.exits import Exit
from kvstore.wire import Message
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent


def test_what_an_agent_has_said_is_kept_until_somebody_listens(clock: Clock) -> None:
    there, wire = remote()
    assert there.said(p.Hello) is None
    wire.hears(HELLO)
    wire.hears(p.Pong())
    assert there.said(p.Hello) == HELLO
    heard: list[Message] = []
    there.handler = lambda _, message: heard.append(message)
    clock.now += 5
    wire.hears(p.Note("x"))
    assert heard == [p.Note("x")]
    assert there.said(p.Note) is None
    assert there.heard == clock.now


def test_an_agent_is_lost_once(clock: Clock) -> None:
    there, wire = remote()
    losses: list[RemoteAgent] = []
    there.on_loss = losses.append
    wire.ends("it was closed")
    there.lose("again", 7)
    assert (there.lost, there.code, losses, wire.closed) == ("it was closed", 1, [there], 1)
    there.send(p.Ping())
    assert wire.sent == []


def test_whoever_has_brought_an_agent_knows_why_it_ended(clock: Clock) -> None:
    carrier = Bringer(how=Exit(code=255), explanation="connection closed")
    there, wire = remote(carrier=carrier, hint=lambda said: f"about {said}")
    wire.ends("it was closed")
    assert there.lost == "ssh to node exited with code 255: connection closed\n(about connection closed)"


def test_or_what_came_instead_of_an_agent_tells(clock: Clock) -> None:
    carrier = Bringer()
    carrier.link.preamble = "This account is not available"
    there, wire = remote(carrier=carrier)
    wire.ends("it was closed")
    assert there.lost == "it was closed: This account is not available"
