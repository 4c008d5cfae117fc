"""Which answers of a host keep it out of a job."""

from __future__ import annotations

from typing import cast

import pytest

import kvstore
from kvstore import wire
from launcher.agents.answers import has_servers, surveyed, unfit, unreached, version_problem
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent


class Answering:
    """An agent that has said this."""

    def __init__(self, *messages: wire.Message) -> None:
        self._said = {type(message): message for message in messages}
        self.members: list[tuple[str, int]] = [("worker", 0)]

    def said(self, kind: type[wire.Message]) -> wire.Message | None:
        return self._said.get(kind)


def host(*messages: wire.Message) -> RemoteAgent:
    return cast(RemoteAgent, Answering(*messages))


def test_versions() -> None:
    assert version_problem(host(p.Hello(kvstore.__version__, "3.11", "node1", -1, ""))) == ""
    assert version_problem(host(p.Hello("0.0.9", "3.11.7", "node1", -1, ""))) == (
        f"has torch-kvstore 0.0.9 (Python 3.11.7), but this machine has {kvstore.__version__}; install the same"
    )


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (p.Surveyed("10.0.0.1", "", False, 9000, ""), ""),
        (p.Surveyed("", "", False, 0, "there is no directory /x"), "there is no directory /x"),
        (p.Surveyed("nowhere", "", False, 9000, ""), "reports the address 'nowhere', which is not an IP address"),
        (p.Surveyed("10.0.0.1", "", False, 0, ""), "its agent does not listen"),
    ],
)
def test_addresses(answer: p.Surveyed, problem: str) -> None:
    assert surveyed(host(answer)) is answer
    assert unfit(host(answer)) == problem


def test_who_cannot_be_reached() -> None:
    assert unreached(host(p.Probed([]))) == unreached(host()) == ""
    assert unreached(host(p.Probed([["this machine", "refused"], ["node2", "silent"]]))) == (
        "cannot reach this machine (refused), node2 (silent); name the network that all share with --interface, "
        "or this machine's --host-ip"
    )


def test_who_must_be_reached() -> None:
    agent = host()
    assert not has_servers(agent)
    agent.members = [("worker", 0), ("standby", 1)]
    assert has_servers(agent)
