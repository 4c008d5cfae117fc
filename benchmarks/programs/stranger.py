"""A stranger that reaches the sockets of a job over plain TCP, and sends invalid messages as fast as it can.

It keeps many connections, writes as much as each accepts, and makes a new one when one is closed.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.programs.servers import environment
from kvstore.transport.sockets.stream import GREETING, packed

CONNECTIONS = 128
POLL_S = 0.05
HOST = "127.0.0.1"
LISTENING = "0A"
MARK = "KVSTORE_STRANGER"  # a variable of the processes to attack, so that those of other jobs are left alone
ROLES = ("scheduler", "server")


def framed(*frames: bytes) -> bytes:
    """Return a message as it crosses a socket."""
    return b"".join(map(bytes, packed(frames)))


def _lengths(dice: random.Random) -> bytes:
    """Frames that are announced as huge, and headers of the greatest length."""
    if dice.random() < 0.5:
        return GREETING + struct.pack("<IQ", 1, 1 << dice.choice((20, 24, 30, 35))) + bytes(1 << 20)
    return GREETING + framed(b"\xdc\xff\xff" + b"\x00" * (8 << 20))


def _nesting(dice: random.Random) -> bytes:
    """Nested lists: very deep ones, and as many as fit into a header."""
    if dice.random() < 0.5:
        return GREETING + framed(b"\x91" * 2000 + b"\xc0") * 10
    return GREETING + framed(b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\x93\x91\xc0\x90\x90" * (1 << 20))


def _random(dice: random.Random) -> bytes:
    """Random bytes, mostly in frames."""
    if dice.random() < 0.1:
        return dice.randbytes(1000)
    return GREETING + b"".join(framed(dice.randbytes(dice.randrange(1, 300))) for _ in range(100))


KINDS: dict[str, Callable[[random.Random], bytes]] = {"lengths": _lengths, "nesting": _nesting, "random": _random}


def listening(mark: str) -> list[int]:
    """Return the ports of the scheduler and the servers with this mark."""
    ports: set[int] = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, UnicodeDecodeError):  # processes come and go, and not all are ours to look at
            if not entry.name.isdigit():
                continue
            env = environment((entry / "environ").read_text())
            if env.get(MARK) == mark and env.get("DMLC_ROLE") in ROLES:
                ports |= _ports(entry)
    return sorted(ports)


def _ports(process: Path) -> set[int]:
    inodes = {str(link.readlink())[8:-1] for link in (process / "fd").iterdir() if "socket:" in str(link.readlink())}
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == LISTENING and row[9] in inodes}


@dataclass
class _Connection:
    port: int
    left: memoryview


class Stranger:
    """One process's connections to a job.

    Args:
        messages: the messages to choose from.
        ports: where the job listens.
    """

    def __init__(self, messages: list[bytes], ports: list[int]) -> None:
        self._messages = messages
        self._ports = ports
        self._selector = selectors.DefaultSelector()
        self._dice = random.Random(1)
        self.made = self.sent = 0

    def run(self) -> None:
        """Send until nobody listens any more."""
        missing = CONNECTIONS
        while self._ports:
            for _ in range(missing):
                self._connect(self._dice.choice(self._ports))
            missing = sum(not self._send(key) for key, _ in self._selector.select())

    def _connect(self, port: int) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((HOST, port))  # what comes of it is seen when it can be written to
        self.made += 1
        message = memoryview(self._dice.choice(self._messages))
        self._selector.register(sock, selectors.EVENT_WRITE, _Connection(port, message))

    def _send(self, key: selectors.SelectorKey) -> bool:
        """Send what goes; return False if the connection is over."""
        assert isinstance(key.fileobj, socket.socket)
        connection: _Connection = key.data
        try:
            count = key.fileobj.send(connection.left)
        except BlockingIOError:
            return True
        except ConnectionRefusedError:
            count = 0
            if connection.port in self._ports:
                self._ports.remove(connection.port)
        except OSError:
            count = 0
        self.sent += count
        connection.left = connection.left[count:]
        if count and connection.left:
            return True
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
        return False


def main() -> None:
    """Attack the job with a mark until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--processes", type=int, default=3, help="how many listen")
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    dice = random.Random(0)
    messages = [KINDS[args.kind](dice) for _ in range(50)]
    while len(ports := listening(args.mark)) < args.processes:
        time.sleep(POLL_S)
    stranger = Stranger(messages, ports)
    began, used = time.monotonic(), time.process_time()
    stranger.run()
    seconds = time.monotonic() - began
    figures = {
        "seconds": seconds,
        "cpu": (time.process_time() - used) / seconds,
        "connections": stranger.made / seconds,
        "megabytes": stranger.sent / seconds / 1e6,
    }
    args.report.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
