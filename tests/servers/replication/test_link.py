"""The link to a standby."""

from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport import InprocNetwork
from servers.replication.process import StandbyLink, stored

SERVER = wire.Node("server", 1, 1)


def test_it_says_first_whose_it_is() -> None:
    network = InprocNetwork()
    mine, theirs = network.transport(), network.transport()
    theirs.bind("inproc://standby")
    link = StandbyLink(mine, "inproc://standby", SERVER)
    link.send(wire.Record(1, 1, wire.encode(wire.Ack(3))))
    received = [theirs.recv(5.0), theirs.recv(5.0)]
    assert [wire.decode(each[1]) for each in received if each is not None] == [
        wire.Here(SERVER),
        wire.Record(1, 1, wire.encode(wire.Ack(3))),
    ]
    peer = received[0][0] if received[0] is not None else b""
    theirs.send(peer, wire.encode(wire.Stored(1, 1)))
    answer = mine.recv(5.0)
    assert answer is not None
    assert answer[0] == link.peer
    assert stored(answer[1]) == wire.Stored(1, 1)
    for end in (mine, theirs):
        end.close()


def test_made_anew_it_says_again_whose_it_is() -> None:
    network = InprocNetwork()
    mine, theirs = network.transport(), network.transport()
    theirs.bind("inproc://standby")
    link = StandbyLink(mine, "inproc://standby", SERVER)
    before = link.peer
    link.renew()
    received = [theirs.recv(5.0), theirs.recv(5.0)]
    assert [wire.decode(each[1]) for each in received if each is not None] == [wire.Here(SERVER), wire.Here(SERVER)]
    assert len({each[0] for each in received if each is not None}) == 2
    assert link.peer != before
    for end in (mine, theirs):
        end.close()


def test_a_standby_says_nothing_else() -> None:
    with pytest.raises(WireError, match="expected Stored of a standby, got Ack"):
        stored(wire.encode(wire.Ack(1)))
