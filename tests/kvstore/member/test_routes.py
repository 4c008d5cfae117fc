"""Routes: where peers listen, and the names of their links, which another transport gives anew."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.member.links import Routes

A, B = b"server 0", b"server 1"


class Connecting:
    """A transport that makes links and drops them; ``failing`` connects raise."""

    def __init__(self, name: str, failing: int = 0) -> None:
        self.name = name
        self.failing = failing
        self.made: list[tuple[str, bool]] = []
        self.dropped: list[bytes] = []

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        if self.failing:
            self.failing -= 1
            raise OSError("too many open files")
        self.made.append((endpoint, bulk))
        return f"{self.name}: {endpoint}".encode()

    def disconnect(self, name: bytes) -> None:
        self.dropped.append(name)


def to(transport: Any) -> Routes:
    return Routes(transport)


def test_peers_and_the_transports_names_of_them() -> None:
    transport = Connecting("first")
    routes = to(transport)
    routes.add(A, "here", False)
    routes.add(B, "there", True)
    assert transport.made == [("here", False), ("there", True)]
    assert routes.names == {A: b"first: here", B: b"first: there"}
    assert routes.peers == {b"first: here": A, b"first: there": B}
    assert routes.endpoints == {A: "here", B: "there"}
    assert routes.leads(B, "there", True)
    assert not routes.leads(B, "there", False)
    assert not routes.leads(b"server 2", "here", False)


def test_a_link_that_is_replaced_is_a_strangers_from_then_on() -> None:
    transport = Connecting("first")
    routes = to(transport)
    routes.add(A, "here", True)
    assert (routes.misleads(A, "elsewhere"), routes.misleads(A, "here"), routes.misleads(B, "here")) == (
        True,
        False,
        False,
    )
    routes.replace(A, "elsewhere")
    assert transport.made[-1] == ("elsewhere", True)
    assert transport.dropped == [b"first: here"]
    assert routes.peers == {b"first: elsewhere": A}
    assert routes.leads(A, "elsewhere", True)


def test_another_transport_has_links_to_the_same_peers_where_they_are_now() -> None:
    old = to(Connecting("first"))
    old.add(A, "here", False)
    old.add(B, "there", True)
    second: Any = Connecting("second")
    new = old.reconnected(second, {A: "elsewhere", b"nobody": "x"})
    assert second.made == [("elsewhere", False), ("there", True)]
    assert new.names == {A: b"second: elsewhere", B: b"second: there"}
    assert old.endpoints == {A: "here", B: "there"}


def test_a_link_that_could_not_be_made_is_made_with_another_transport() -> None:
    routes = to(Connecting("first", failing=1))
    with pytest.raises(OSError, match="too many"):
        routes.add(A, "here", True)
    assert routes.names == {}
    second: Any = Connecting("second")
    assert routes.reconnected(second, {}).names == {A: b"second: here"}
