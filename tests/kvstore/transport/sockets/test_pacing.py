"""To what rate connections are kept, and that it is Linux that keeps them to it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import LONG, came, until

from kvstore.job.config import Config
from kvstore.transport.choose import links
from kvstore.transport.sockets import places
from kvstore.transport.sockets import socket_transport as sockets
from kvstore.transport.sockets.places import (
    BUSY,
    FAST,
    LEAST,
    LOOK_S,
    TIMES,
    UNLIMITED,
    LinkProgress,
    Pacing,
    TcpPlaces,
)
from kvstore.transport.sockets.socket_transport import TcpTransport

MB = 1_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to keep to a rate")


class Host:
    """Connections that go on at the rates they are told to."""

    def __init__(self) -> None:
        self.pacing: Pacing[object] = Pacing()
        self._now = 100.0
        self._acked = [0] * 9
        self._busy = [0.0] * 9

    def goes_on(
        self, *rates: float, busy: float = 1.0, more: bool | Sequence[bool] = True, seconds: float = LOOK_S
    ) -> int | None:
        """Let time go by; return what is said at the next look.

        Args:
            rates: bytes a second, of each connection.
            busy: how much of the time they had something to send.
            more: whether they still have, of all or of each.
        """
        self._now += seconds
        seen: dict[object, LinkProgress] = {}
        for number, rate in enumerate(rates):
            self._busy[number] += busy * seconds
            self._acked[number] += int(rate * busy * seconds)
            waits = more if isinstance(more, bool) else more[number]
            seen[number] = LinkProgress(self._acked[number], self._busy[number], waits)
        return self.pacing.look(seen, self._now)


@pytest.fixture
def host() -> Host:
    made = Host()
    assert made.goes_on(30 * MB, 30 * MB) is None, "the first look has nothing to compare with"
    return made


def near(rate: float) -> object:
    return pytest.approx(rate, rel=0.001)


def test_all_may_send_three_times_as_fast_as_the_fastest_has(host: Host):
    assert host.goes_on(30 * MB, 20 * MB) == near(90 * MB)
    assert host.goes_on(25 * MB, 27 * MB) == near(81 * MB)


def test_a_line_that_has_become_free_is_filled_again_soon(host: Host):
    rate, line, looks = 10.0 * MB, 1000 * MB, 0
    while rate < line / 3:
        limit = host.goes_on(rate, rate)
        assert limit is not None
        rate, looks = min(line, limit), looks + 1
    assert looks <= 4, "a second"


@pytest.mark.parametrize(
    ("how", "then"),
    [
        (partial(Host.goes_on, busy=BUSY - 0.01), 90 * MB),
        (partial(Host.goes_on, more=False), None),
        (partial(Host.goes_on, seconds=LEAST / (31 * MB)), 90 * MB),
    ],
    ids=["not busy all the time", "all has left", "too little"],
)
def test_who_was_not_kept_waiting_by_the_line_says_nothing(
    host: Host, how: Callable[..., int | None], then: int | None
):
    """Else a few small messages, or a server that was away for a while, would slow down what comes next."""
    assert how(host, 30 * MB, 30 * MB) is None
    assert host.goes_on(30 * MB, 30 * MB, more=(False, True)) == (then and near(then))
    assert host.goes_on(5 * MB, 20 * MB, more=True) == near(60 * MB), "nothing of this remains"


def test_who_had_nothing_to_send_at_the_beginning_does_not_count(host: Host):
    host.goes_on(30 * MB, 30 * MB, more=(False, True))
    assert host.goes_on(100 * MB, 20 * MB) == near(60 * MB)


def test_an_outage_changes_nothing(host: Host):
    assert host.goes_on(30 * MB, 30 * MB) == near(90 * MB)
    for _ in range(10):
        assert host.goes_on(0, 0) is None
    assert host.goes_on(30 * MB, 30 * MB) == near(90 * MB)


def test_fast_lines_are_left_alone(host: Host):
    assert host.goes_on(FAST / TIMES + MB, 30 * MB) is None
    assert host.goes_on(30 * MB, 30 * MB) == near(90 * MB)
    assert host.goes_on(FAST / TIMES + MB, 30 * MB) == UNLIMITED, "what was limited is not any more"
    assert host.goes_on(FAST / TIMES + MB, 30 * MB) is None


def test_connections_come_and_go(host: Host):
    assert host.goes_on(30 * MB) == near(90 * MB)
    assert host.goes_on(30 * MB, 200 * MB) == near(90 * MB), "the second has just come back"
    assert host.goes_on() is None
    assert host.goes_on(30 * MB, 20 * MB) is None
    assert host.goes_on(30 * MB, 20 * MB) == near(90 * MB)


def test_an_outage_that_nobody_looked_at_changes_nothing(host: Host):
    """Else what has come through at its beginning would be all that may from then on."""
    assert host.goes_on(30 * MB, 30 * MB) == near(90 * MB)
    assert host.goes_on(MB, MB, seconds=60) is None
    assert host.goes_on(30 * MB, 30 * MB) == near(90 * MB)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 2**40), st.floats(0, 1), st.booleans())),
        )
    )
)
def test_every_limit_lets_so_much_through_that_the_next_look_counts(
    looks: list[tuple[float, dict[int, tuple[int, float, bool]]]],
):
    one: Pacing[int] = Pacing()
    now, seen = 0.0, dict.fromkeys(range(4), LinkProgress(0, 0.0, False))
    for seconds, those in looks:
        now += seconds
        for number, (sent, busy, more) in those.items():
            seen[number] = LinkProgress(seen[number].acked + sent, seen[number].busy + busy * seconds, more)
        limit = one.look(seen, now)
        assert limit is None or limit == UNLIMITED or 2 * LEAST / LOOK_S < limit < FAST


# ---- real connections


def limit_of(made: socket.socket) -> int:
    return int.from_bytes(made.getsockopt(socket.SOL_SOCKET, places.SO_MAX_PACING_RATE, 8), sys.byteorder)


def connection(end: TcpTransport) -> socket.socket:
    (link,) = end.links.values()
    assert link.socket is not None
    return link.socket


class Ends:
    """Two ends of a link over TCP, which count as on two hosts: their addresses differ."""

    def __init__(self, one: TcpTransport, two: TcpTransport) -> None:
        self.one, self.two = one, two
        self.peer = one.connect(two.bind("tcp://127.0.0.2:0"))
        one.send(self.peer, [b"here"])
        received = came(two)
        two.admit(received[0])
        self.exchange()

    def exchange(self) -> None:
        """Send something and have an answer."""
        self.one.send(self.peer, [b"x" * LEAST])
        received = came(self.two)
        assert bytes(received[1][0]) == b"x" * LEAST
        self.two.send(received[0], [b"thanks"])
        assert self.one.recv(LONG) is not None

    def limits(self) -> set[int]:
        """Those of both ends."""
        return {limit_of(connection(end)) for end in (self.one, self.two)}

    def close(self) -> None:
        """Close both."""
        self.one.close()
        self.two.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LOOK_S", 0.0)


@linux
@pytest.mark.usefixtures("often")
def test_linux_keeps_connections_to_the_limit_and_is_told_when_there_is_none_any_more(monkeypatch: pytest.MonkeyPatch):
    said: list[int | None] = [None]
    monkeypatch.setattr(Pacing, "look", lambda *_: said[-1])
    ends = Ends(TcpTransport(), TcpTransport())
    try:
        (before,) = ends.limits()
        for says, limit in [(300 * MB, 300 * MB), (None, 300 * MB), (400 * MB, 400 * MB), (UNLIMITED, before)]:
            said.append(says)
            ends.exchange()
            assert ends.limits() == {limit}
    finally:
        ends.close()


@linux
@pytest.mark.usefixtures("often")
def test_what_linux_says_of_a_connection(monkeypatch: pytest.MonkeyPatch):
    looks: list[LinkProgress] = []

    def look(_: Pacing[object], seen: dict[object, LinkProgress], _now: float) -> None:
        looks.extend(seen.values())

    monkeypatch.setattr(Pacing, "look", look)
    ends = Ends(TcpTransport(), TcpTransport())
    try:
        made = connection(ends.one)
        for number in range(2, 5):
            ends.exchange()
            until(
                lambda least=number * LEAST: places.progress_of(made).acked >= least, "the last of it to be confirmed"
            )
            assert places.progress_of(made).acked < number * LEAST + 1000 * number
            assert not places.progress_of(made).more

        def some_time() -> bool:
            ends.exchange()
            return places.progress_of(made).busy > 0  # Linux counts in ticks of its clock

        until(some_time, "some time")
    finally:
        ends.close()
    assert any(seen.acked >= 2 * LEAST for seen in looks), "looks are taken while messages are waited for"


@linux
def test_time_in_which_the_other_side_has_no_room_does_not_count():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as made:
            made.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    made.send(bytes(LEAST))  # nobody reads it
            before = [places.progress_of(made)]

            def stands_still() -> bool:
                before.append(places.progress_of(made))
                return before[-1].more and before[-1] == before[-2]

            until(stands_still, "an end of what goes on", step=0.1)


@linux
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("fast", [FAST, 2**62])
def test_messages_arrive_whatever_is_measured(monkeypatch: pytest.MonkeyPatch, fast: int):
    monkeypatch.setattr(places, "FAST", fast)
    ends = Ends(TcpTransport(), TcpTransport())
    try:
        for _ in range(20):
            ends.exchange()
    finally:
        ends.close()


@linux
def test_one_host_has_no_line(monkeypatch: pytest.MonkeyPatch):
    """What goes to oneself is neither looked at nor limited."""
    seen: list[object] = []

    def look(_: Pacing[object], those: dict[object, LinkProgress], _now: float) -> int:
        seen.extend(those)
        return 300 * MB

    monkeypatch.setattr(Pacing, "look", look)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as made:
        before = limit_of(made)
        TcpPlaces().share([made], 1.0)
        assert limit_of(made) == before
    assert seen == []


@linux
def test_a_connection_that_has_ended_is_no_error_and_the_others_are_seen_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pacing, "look", lambda *_: 300 * MB)
    with socket.create_server(("127.0.0.2", 0)) as listener:
        ended = socket.create_connection(listener.getsockname())
        ended.close()
        with socket.create_connection(listener.getsockname()) as made:
            TcpPlaces().share([ended, made], 1.0)
            assert limit_of(made) == 300 * MB


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Pacing, "__init__", never)
    transport = links(Config(root="tcp://10.0.0.1:9", pacing=False))()
    transport.close()
    with pytest.raises(AssertionError):
        links(Config(root="tcp://10.0.0.1:9"))()
