"""Links with keys: members reach each other, and nothing of what strangers send reaches the code behind the socket."""

from __future__ import annotations

import dataclasses
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from jobkeys import variables
from strangers import BYTES, HELLO_BYTES, NULL, READY, Tap, attempt, frame, greeting, idle, throw
from waiting import LONG, came
from zeromq_sockets import Sockets

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import CurveKeys, pair, split_key, with_key
from kvstore.transport import zeromq
from kvstore.transport.shm import presence
from kvstore.transport.shm.shared_memory import LARGE, SharedMemoryTransport
from kvstore.transport.zeromq import ZmqTransport

JOB = [CurveKeys.from_env(env) for env in variables(3)]
OTHER_JOB = [CurveKeys.from_env(env) for env in variables(2)]
Make = Callable[..., ZmqTransport]


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    left = {type(thread).__name__ for thread in threading.enumerate()}
    assert left <= {"_MainThread", "GarbageCollectorThread"}, "pyzmq has one for all sockets of a process"


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ZmqTransport] = []

    def transport(keys: CurveKeys | None = None, root_fd: int = -1) -> ZmqTransport:
        made.append(ZmqTransport(root_fd, keys))
        return made[-1]

    yield transport
    for one in made:
        one.close()


class Listener:
    """The scheduler's end, and an honest member's.

    Attributes:
        endpoint: where members connect.
        impatient: another endpoint of the same socket, where a handshake has 300 ms: for strangers who wait for more.
    """

    def __init__(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            sockets = Sockets(patched)
            self.transport = make(JOB[0])
        self.endpoint = self.transport.bind("tcp://127.0.0.1:0")
        sockets.last(zmq.ROUTER).set(zmq.HANDSHAKE_IVL, 300)
        self.impatient = self.transport.bind("tcp://127.0.0.1:0")
        self._honest = make(JOB[1])
        self._link = self._honest.connect(self.endpoint)
        self.hears_only_the_honest()

    def hears_only_the_honest(self) -> None:
        self._honest.send(self._link, [b"honest", bytes(100_000)])
        received = came(self.transport)
        assert received[1] == [b"honest", bytes(100_000)]
        self.transport.send(received[0], [b"answer"])
        assert self._honest.recv(LONG) == (self._link, [b"answer"])
        assert self.transport.recv(0) is None


@pytest.fixture
def listener(make: Make, monkeypatch: pytest.MonkeyPatch) -> Listener:
    return Listener(make, monkeypatch)


# ---- addresses and keys


def test_a_listeners_endpoint_has_its_key_and_fits_a_message(make: Make):
    endpoint = make(JOB[2]).bind("tcp://127.0.0.1:0")
    bare, found = split_key(endpoint)
    assert bare.startswith("tcp://127.0.0.1:")
    assert found == JOB[2].public
    assert len(endpoint) < 200
    assert endpoint.isascii()


def test_the_schedulers_endpoint_has_its_key_already(make: Make):
    sock = socket.create_server(("127.0.0.1", 0))
    endpoint = with_key("tcp://{}:{}".format(*sock.getsockname()), JOB[0].root)
    listener, other = make(JOB[0], sock.detach()), make(JOB[1])
    assert listener.bind(endpoint) == endpoint
    other.send(other.connect(endpoint), [b"hello"])
    received = came(listener)
    assert received[1] == [b"hello"]
    with pytest.raises(ConfigError, match="not that of this process's KVSTORE_SECRET_KEY"):
        make(JOB[1]).bind(endpoint)
    with pytest.raises(ConfigError, match="not that of this process's KVSTORE_SECRET_KEY"):
        make().bind(endpoint)


def test_one_end_listens_with_a_key_connects_with_one_and_has_unix_sockets_without(make: Make):
    one, two, plain = make(JOB[0]), make(JOB[1]), make()
    with tempfile.TemporaryDirectory() as directory:
        endpoint = one.bind("tcp://127.0.0.1:0")
        path = one.bind(f"ipc://{directory}/one")
        assert path == f"ipc://{directory}/one"
        listening = two.bind("tcp://127.0.0.1:0")
        links = [(two, two.connect(endpoint), one), (two, two.connect(path), one), (plain, plain.connect(path), one)]
        links.append((one, one.connect(listening), two))
        for number, (sender, link, receiver) in enumerate(links):
            sender.send(link, [b"%d" % number])
            received = came(receiver)
            assert received[1] == [b"%d" % number]
            receiver.send(received[0], [b"back"])
            assert sender.recv(LONG) == (link, [b"back"])


def test_a_link_without_a_key_is_refused_at_once(make: Make):
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:9 has no key.*KVSTORE_ENCRYPTION=0"):
        make(JOB[0]).connect("tcp://127.0.0.1:9")


def test_a_key_is_refused_where_there_is_none(make: Make):
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:9 has a key.*set KVSTORE_SECRET_KEY, .*ENCRYPTION=0"):
        make().connect(with_key("tcp://127.0.0.1:9", JOB[0].public))


def test_nobody_connects_to_a_key_of_another_job(make: Make):
    with pytest.raises(ConfigError, match="are another job's"):
        make(JOB[0]).connect(with_key("tcp://127.0.0.1:9", OTHER_JOB[0].public))


def test_a_process_whose_own_key_is_not_listed_learns_it_at_once(make: Make):
    with pytest.raises(ConfigError, match="belongs to none of KVSTORE_MEMBER_KEYS"):
        make(dataclasses.replace(JOB[0], secret=pair()[1]))


# ---- strangers


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (JOB[0].public, OTHER_JOB[1].public, OTHER_JOB[1].secret),
        (JOB[1].public, JOB[2].public, JOB[2].secret),
        (JOB[0].public, JOB[2].public, OTHER_JOB[1].secret),
    ],
    ids=["no key", "not listed", "wrong server", "another's public key"],
)
def test_a_zeromq_client_without_the_right_keys_is_refused(listener: Listener, keys: tuple[str, ...]):
    attempt(listener.endpoint, *keys)
    listener.hears_only_the_honest()


@pytest.mark.parametrize("what", BYTES)
def test_bytes_that_are_no_members_cost_their_connection(listener: Listener, what: str):
    throw(listener.impatient, BYTES[what])
    listener.hears_only_the_honest()


@pytest.mark.parametrize("passed", [0, 1, 10, 63, 64, 100, HELLO_BYTES, HELLO_BYTES + 1, HELLO_BYTES + 200])
def test_who_stops_in_the_middle_of_the_handshake_is_dropped(listener: Listener, make: Make, passed: int):
    tap = Tap(listener.impatient, limit=passed)
    try:
        slow = make(JOB[2])
        slow.send(slow.connect(tap.endpoint), [b"never"])
        assert tap.ended.wait(LONG)
        listener.hears_only_the_honest()
    finally:
        tap.close()


def test_a_thousand_connections_that_send_nothing_cost_nobody_anything(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 2000)
    listener = Listener(make, monkeypatch)
    with idle(listener.endpoint, 1000) as strangers:
        listener.hears_only_the_honest()
        another = make(JOB[2])
        another.send(another.connect(listener.endpoint), [b"honest too"])
        received = came(listener.transport)
        assert received[1] == [b"honest too"]
        for sock in strangers:
            while sock.recv(1000):  # our greeting, then the end
                pass
    listener.hears_only_the_honest()


@pytest.mark.parametrize("step", [0, 7, 64, 1000])
def test_recorded_bytes_are_of_no_use(listener: Listener, make: Make, step: int):
    tap = Tap(listener.endpoint)
    try:
        member = make(JOB[2])
        link = member.connect(tap.endpoint)
        for number in range(3):
            member.send(link, [b"secret of a member", b"%d" % number])
            received = came(listener.transport)
            assert received[1] == [b"secret of a member", b"%d" % number]
        member.close()
        recorded = bytes(tap.recorded)
    finally:
        tap.close()
    assert len(recorded) > HELLO_BYTES + 300
    assert b"secret of" not in recorded
    listener.hears_only_the_honest()
    throw(listener.impatient, recorded)
    if step:
        throw(listener.impatient, recorded[:HELLO_BYTES] + recorded[HELLO_BYTES + step :])
    listener.hears_only_the_honest()


@pytest.mark.parametrize("what", ["plain", "again", "flipped"])
def test_what_somebody_adds_to_a_members_link_is_not_taken(listener: Listener, make: Make, what: str):
    tap = Tap(listener.endpoint)
    try:
        member = make(JOB[2])
        link = member.connect(tap.endpoint)
        member.send(link, [b"first"])
        assert listener.transport.recv(LONG) is not None
        before = len(tap.recorded)
        member.send(link, [b"second"])
        assert listener.transport.recv(LONG) is not None
        message = bytes(tap.recorded[before:])
        forged = {"plain": frame(b"forged"), "again": message, "flipped": message[:-1] + bytes([message[-1] ^ 1])}[what]
        tap.inject(forged)
        assert tap.ended.wait(LONG), "it costs the connection"
        listener.hears_only_the_honest()
    finally:
        tap.close()


def test_refusals_are_counted_and_do_not_fill_the_log(listener: Listener, caplog: pytest.LogCaptureFixture):
    public, secret = pair()
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            attempt(listener.endpoint, JOB[0].public, public, secret)
    listener.hears_only_the_honest()
    found = [record.getMessage() for record in caplog.records]
    assert found == [f"refused a connection with a key that is not of this job ({n} so far)" for n in (1, 10)]


# ---- the other way round: whoever listens at the address of a member


def _listens(keys: dict[str, str]) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], zmq.Socket[bytes]]:
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    for name, text in keys.items():
        sock.set(getattr(zmq, name), text.encode())
    if keys:
        sock.set(zmq.CURVE_SERVER, 1)
    monitor = sock.get_monitor_socket(zmq.EVENT_ALL & ~zmq.EVENT_ACCEPTED & ~zmq.EVENT_LISTENING)
    sock.bind("tcp://127.0.0.1:0")
    return context, sock, monitor


@pytest.mark.parametrize("keys", [{}, {"CURVE_SECRETKEY": OTHER_JOB[0].secret}], ids=["plain", "another's key"])
def test_who_listens_in_the_place_of_a_member_gets_nothing(make: Make, keys: dict[str, str]):
    context, sock, monitor = _listens(keys)
    try:
        member = make(JOB[1])
        member.send(member.connect(with_key(sock.get_string(zmq.LAST_ENDPOINT), JOB[0].public)), [b"a gradient"])
        assert monitor.poll(LONG * 1000), "no end of the handshake"
        assert monitor.recv_multipart()[0][:2] != zmq.EVENT_HANDSHAKE_SUCCEEDED.to_bytes(2, "little")
        assert not sock.poll(0)
        assert member.recv(0) is None
        sock.disable_monitor()
    finally:
        monitor.close()
        sock.close()
        context.term()


def test_who_answers_without_security_gets_nothing(make: Make):
    """A listener that speaks to a member as to one without keys: the member hangs up, and has said nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        endpoint = with_key("tcp://{}:{}".format(*sock.getsockname()), JOB[0].public)
        member = make(JOB[1])
        member.send(member.connect(endpoint), [b"a gradient"])
        sock.settimeout(LONG)
        connection, _ = sock.accept()
        with connection:
            connection.settimeout(LONG)
            connection.sendall(greeting(NULL) + READY + frame(b"forged"))
            heard = b""
            try:
                while data := connection.recv(1000):
                    heard += data
            except ConnectionResetError:
                pass
        assert b"gradient" not in heard
        assert member.recv(0) is None
        member.close()


@pytest.mark.parametrize("keys", [(None, None), (JOB[0], JOB[1])], ids=["plain", "keys"])
def test_who_gives_up_a_handshake_tries_again(
    make: Make, keys: tuple[CurveKeys, CurveKeys], monkeypatch: pytest.MonkeyPatch
):
    """As when the scheduler's port was opened by its launcher long before it starts."""
    monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 100)
    sock = socket.create_server(("127.0.0.1", 0))
    endpoint = "tcp://{}:{}".format(*sock.getsockname())
    other = make(keys[1])
    other.send(other.connect(with_key(endpoint, JOB[0].public) if keys[0] else endpoint), [b"early"])
    sock.settimeout(LONG)
    silent, _ = sock.accept()
    with silent:
        silent.settimeout(LONG)
        while silent.recv(1000):  # a greeting, and then the end
            pass
    listener = make(keys[0], sock.detach())
    listener.bind(endpoint)
    received = came(listener)
    assert received[1] == [b"early"]


# ---- ending


def test_an_end_closes_in_the_middle_of_handshakes():
    for _ in range(20):
        listener = ZmqTransport(keys=JOB[0])
        endpoint = listener.bind("tcp://127.0.0.1:0")
        others = [ZmqTransport(keys=keys) for keys in JOB[1:]]
        for other in others:
            other.send(other.connect(endpoint), [b"x"])
        with socket.create_connection(("127.0.0.1", int(split_key(endpoint)[0].rpartition(":")[2]))):
            listener.close()
        for other in others:
            other.close()


# ---- shared memory


@pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here")
def test_members_on_one_host_share_memory_over_encrypted_links(make: Make, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        monkeypatch.setattr(presence, "DIRECTORY", Path(directory))
        listener, other = (SharedMemoryTransport(make(keys), "job") for keys in JOB[:2])
        tap = Tap(listener.bind("tcp://127.0.0.1:0"))
        try:
            link = other.connect(tap.endpoint)
            for number in range(4):
                memory = other.allocate(16 * LARGE)
                memory[:] = bytes([number + 1]) * len(memory)
                other.send(link, [b"head", memory])
                received = came(listener)
                assert received[1] == [b"head", bytes([number + 1]) * len(memory)]
                listener.send(received[0], [b"got"])
                assert other.recv(LONG) == (link, [b"got"])
                if number == 0:
                    before = len(tap.recorded)
                del received, memory
            assert len(tap.recorded) - before < 1000, "references only"
        finally:
            other.close()
            listener.close()
            tap.close()
        assert list(Path(directory).iterdir()) == []
