"""A member's links and the requests on them: sent, answered, recovered, given up. The transport is the test's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.member.links import Links, Routes
from kvstore.member.outstanding import PendingRequest, Question, Turn, ready
from kvstore.ticket import Operation

NODE = wire.Node("worker", 1, 77)
WINDOW = 1 << 20
BARRIER = {"store": 0, "number": 0}
A, B = b"server 0", b"server 1"


class Ends:
    """A transport that keeps what is sent, and gives what the test lets arrive."""

    def __init__(self, made: list[Ends]) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        self.dropped: list[bytes] = []
        self.abandoned = self.detached = False
        self.closed: float | None = None
        self._number = len(made)

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return f"{endpoint}#{self._number}".encode()

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        self.sent.append((peer.partition(b"#")[0], wire.decode([bytes(frame) for frame in frames])))

    def recv(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        return self.inbox.popleft() if self.inbox else None

    def arrive(self, peer: bytes, message: wire.Message | None) -> None:
        """Let a message come, or, if it is None, the news that the link was lost and has been made anew."""
        self.inbox.append((peer + b"#%d" % self._number, [] if message is None else wire.encode(message)))

    def disconnect(self, peer: bytes) -> None:
        self.dropped.append(peer)

    def abandon(self) -> None:
        self.abandoned = True

    def detach(self) -> None:
        self.detached = True

    def close(self, linger: float = 0.0) -> None:
        self.closed = linger


class Case:
    """Links to two servers, and all ends that have been made for them; the last ones are in use."""

    def __init__(self) -> None:
        self.made: list[Ends] = []
        self.refusals: list[OSError] = []
        self.links = Links(self.make, NODE, WINDOW)
        for peer in (A, B):
            assert self.links.connect(peer, peer.decode(), False) == peer

    def make(self) -> Any:
        if self.refusals:
            raise self.refusals.pop()
        self.made.append(Ends(self.made))
        return self.made[-1]

    @property
    def ends(self) -> Ends:
        return self.made[-1]

    def ask(self, *peers: bytes, **how: Any) -> Operation:
        operation = Operation("x")
        self.submit(*(Question(peer, operation, wire.Barrier, BARRIER, operation.take) for peer in peers))
        return operation

    def submit(self, *requests: PendingRequest) -> None:
        self.links.submit(requests[0].operation, ready, (requests,))

    def receive(self) -> None:
        self.links.receive(lambda: False, 0.0)

    def hear(self, peer: bytes, message: wire.Message | None) -> None:
        self.ends.arrive(peer, message)
        self.receive()

    def asked(self) -> list[tuple[bytes, int]]:
        """The requests that were sent over the ends in use."""
        return [(peer, message.seq) for peer, message in self.ends.sent if isinstance(message, wire.Request)]


@pytest.fixture
def case() -> Case:
    return Case()


class Values(PendingRequest):
    """Reads an array of the caller's when it goes; ``failing`` is raised instead, so often."""

    early = False

    def __init__(self, peer: bytes, operation: Operation, array: bytearray, turn: Turn | None = None) -> None:
        super().__init__(peer, operation, turn=turn)
        self.array = array
        self.failing: list[Exception] = []
        self.forsaken = False

    def message(self, sender: wire.Sender) -> wire.Message:
        if self.failing:
            raise self.failing.pop()
        return wire.Barrier(sender, store=0, number=self.array[0])

    def forsake(self) -> None:
        self.forsaken = True


def test_every_link_begins_by_saying_whose_it_is(case: Case) -> None:
    assert case.ends.sent == [(A, wire.Here(NODE)), (B, wire.Here(NODE))]
    assert case.links.connect(A, "server 0", False) == A, "it is there already"
    assert len(case.ends.sent) == 2
    stranger = Links(case.make, wire.Node("worker", -1, 77), WINDOW)
    stranger.connect(A, "server 0", False)
    assert case.ends.sent == [], "who has no rank yet has nothing to say"


def test_requests_are_numbered_and_answers_find_them(case: Case) -> None:
    first, second = case.ask(A, B), case.ask(A)
    assert case.asked() == [(A, 1), (B, 2), (A, 3)]
    case.ends.arrive(B, wire.Ack(2))
    case.hear(A, wire.Ack(3))
    assert (first.done(), second.done(), second.wait()) == (False, True, wire.Ack(3))
    assert case.links.answers == 2
    case.hear(A, wire.Ack(1))
    assert first.done()


def test_over_a_link_that_was_lost_all_that_has_no_answer_is_sent_again_in_order(case: Case) -> None:
    case.ask(A, B, A, A)
    case.ends.arrive(A, wire.Ack(3))
    case.ends.arrive(A, None)
    before = len(case.ends.sent)
    case.receive()
    again = case.ends.sent[before:]
    assert again[0] == (A, wire.Here(NODE))
    assert [message.seq for _, message in again[1:]] == [1, 4]


def test_requests_in_turn_go_by_priority_while_the_window_has_room(case: Case) -> None:
    operation = Operation("x")
    case.submit(*(Values(A, operation, bytearray(1), Turn(WINDOW, priority)) for priority in (0, 1, 2)))
    assert case.asked() == [(A, 3)]
    assert case.links.congested
    case.hear(A, wire.Ack(3))
    assert case.asked() == [(A, 3), (A, 2)]
    case.links.hurry(operation)
    assert case.asked() == [(A, 3), (A, 2), (A, 1)]
    assert not case.links.congested


def test_links_that_are_made_anew_ask_again_what_had_gone(case: Case) -> None:
    operation = Operation("x")
    case.submit(*(Values(A, operation, bytearray(1), Turn(WINDOW, 0)) for _ in range(2)))
    case.ask(B)
    old = case.ends
    case.links.suspect()
    assert case.links.in_doubt
    case.links.recover()
    assert not case.links.in_doubt
    assert old.abandoned
    assert case.ends is not old
    assert case.ends.sent[:2] == [(A, wire.Here(NODE)), (B, wire.Here(NODE))]
    assert case.asked() == [(A, 1), (B, 3)], "the second waits for its turn still"
    case.hear(A, wire.Ack(1))
    assert case.asked()[-1] == (A, 2)


def test_a_peer_that_is_elsewhere_is_asked_there_what_it_has_not_answered(case: Case) -> None:
    operation = Operation("x")
    case.submit(*(Values(A, operation, bytearray(1), Turn(WINDOW, 0)) for _ in range(2)))
    case.ask(B)
    case.ask(A)
    before = len(case.ends.sent)
    case.links.move(A, "elsewhere")
    assert case.links.in_doubt
    case.links.recover()
    assert not case.links.in_doubt
    (ends,) = case.made
    assert ends.dropped == [b"server 0#0"], "no other link is touched"
    again = ends.sent[before:]
    assert again[0] == (b"elsewhere", wire.Here(NODE))
    assert [(peer, message.seq) for peer, message in again[1:]] == [(b"elsewhere", 1), (b"elsewhere", 4)]
    ends.arrive(A, wire.Ack(1))
    case.receive()
    assert case.links.answers == 0, "the one that it was is not heard any more"
    ends.arrive(b"elsewhere", wire.Ack(1))
    case.receive()
    assert case.asked()[-1] == (b"elsewhere", 2), "the window has kept its place"
    assert case.links.endpoints[A] == "elsewhere"


def test_only_what_moves_somewhere_else_is_followed_and_nothing_once_the_links_are_closed(case: Case) -> None:
    case.ask(A)
    for peer, endpoint in ((A, "there"), (b"nobody", "x"), (A, "elsewhere"), (A, "elsewhere"), (B, "server 1")):
        case.links.move(peer, endpoint)
    case.links.recover()
    assert case.ends.dropped == [b"server 0#0"], "only the latest place counts"
    assert case.asked() == [(A, 1), (b"elsewhere", 1)]
    case.links.close(0.0)
    case.links.move(A, "there")
    case.links.recover()
    assert len(case.made) == 1


def test_a_move_that_comes_when_all_links_are_made_anew_goes_with_them(case: Case) -> None:
    case.ask(A, B)
    case.links.suspect()
    case.links.move(A, "elsewhere")
    case.links.recover()
    assert case.asked() == [(b"elsewhere", 1), (B, 2)]
    assert case.made[0].dropped == case.made[1].dropped == []


@pytest.mark.parametrize("number", range(1, 4))
def test_a_move_that_an_exception_cuts_short_is_made_with_the_next_mending(case: Case, number: int) -> None:
    """Wherever the exception comes: at the connect, the greeting, or a request."""
    case.ask(A, B)
    calls, ends = 0, case.ends
    connect, send = ends.connect, ends.send

    def counted(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return (connect if how else send)(*args, **how)

    ends.connect = ends.send = counted  # type: ignore[method-assign]
    case.links.move(A, "elsewhere")
    with pytest.raises(KeyboardInterrupt):
        case.links.recover()
    assert case.links.in_doubt
    case.links.recover()
    assert not case.links.in_doubt
    assert ends.abandoned
    assert case.asked() == [(b"elsewhere", 1), (B, 2)]


def test_a_request_that_cannot_be_prepared_leaves_nothing_behind(case: Case) -> None:
    def refuse(_operation: Operation) -> Any:
        raise KVStoreError("not now")

    with pytest.raises(KVStoreError, match="not now"):
        case.links.submit(Operation("x"), refuse, ())
    assert not case.links.in_doubt
    case.links.submit(Operation("x"), ready, ([],))
    case.ask(A)
    assert case.asked() == [(A, 1)]


def test_a_message_that_cannot_be_made_the_second_time_either_fails_its_operation_alone(case: Case) -> None:
    bad, good = Operation("bad"), Operation("good")
    request = Values(A, bad, bytearray(1))
    request.failing = [ValueError("again"), ValueError("first")]
    with pytest.raises(ValueError, match="first"):
        case.submit(request)
    assert case.links.in_doubt
    case.links.recover()
    assert case.links.blamed is request.failure
    with pytest.raises(KVStoreError, match=r"a message could not be made: ValueError\('again'\)"):
        bad.wait()
    case.submit(Values(B, good, bytearray(1)))
    assert case.asked() == [(B, 2)]


def test_an_exception_of_a_handler_while_a_message_is_made_is_not_the_messages(case: Case) -> None:
    operation = Operation("x")
    request = Values(A, operation, bytearray(1))
    request.failing = [TimeoutError("an alarm")]
    with pytest.raises(TimeoutError):
        case.submit(request)
    case.links.recover()
    assert case.asked() == [(A, 1)]
    assert operation.error is None
    assert case.links.blamed is None


def test_what_is_given_up_is_sent_as_it_was_and_takes_nothing(case: Case) -> None:
    operation, array = Operation("x"), bytearray([5])
    gone, waiting = (Values(A, operation, array, Turn(WINDOW, 0)) for _ in range(2))
    case.submit(gone, waiting)
    assert operation in case.links.lent, "the second will read the array when it goes"
    case.links.give_up(operation)
    assert (gone.forsaken, waiting.forsaken, case.ends.detached) == (True, True, True)
    array[0] = 9
    case.hear(A, wire.Ack(1))
    assert [message.number for peer, message in case.ends.sent if isinstance(message, wire.Barrier)] == [5, 5]
    assert not waiting.borrows


@pytest.mark.parametrize("times", [1, 2])
def test_links_that_cannot_be_made_stay_torn_and_the_next_try_makes_them(case: Case, times: int) -> None:
    case.ask(A)
    case.refusals = [OSError("too many open files")] * times
    case.links.suspect()
    for _ in range(times):
        with pytest.raises(OSError, match="too many"):
            case.links.recover()
        assert case.links.in_doubt
    case.links.recover()
    assert case.asked() == [(A, 1)]


def test_after_close_nothing_is_received_nor_made_anew(case: Case) -> None:
    case.links.close(0.5)
    assert case.ends.closed == 0.5
    case.hear(A, wire.Ack(1))
    assert len(case.ends.inbox) == 1
    case.links.suspect()
    case.links.recover()
    assert len(case.made) == 1


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
