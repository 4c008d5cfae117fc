"""Arenas and their readers, processes that have some, and ends of links that share memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgpack
from inproc import InprocNetwork, InprocTransport
from waiting import came

from kvstore.transport.shm.arena import Arena
from kvstore.transport.shm.presence import PeerPresence
from kvstore.transport.shm.shared_memory import LARGE, Mapped, SharedMemoryTransport

BIG = bytes(range(256)) * (LARGE // 256)
Make = Callable[[], Arena]
Begin = Callable[[str], "subprocess.Popen[str]"]


class Pair:
    """An arena, and another process's view of it as far as one process can have both."""

    def __init__(self, owner: Arena, reader: Arena) -> None:
        self.owner = owner
        self.mapped = Mapped(owner.presence.name, owner.presence.nonce, reader.presence)
        self.reader = PeerPresence(reader.presence.name, reader.presence.nonce)

    def carry(self, frame: memoryview) -> memoryview:
        reference = self.owner.refer(frame, self.reader)
        assert reference is not None
        return self.mapped.view(*reference)


ALONE = """
import os, sys
from pathlib import Path
from kvstore.transport.shm import presence
presence.DIRECTORY = Path(sys.argv[1])
from kvstore.transport.shm.arena import Arena
from kvstore.transport.shm.shared_memory import Mapped
from kvstore.transport.shm.presence import Presence, PeerPresence
"""


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class Spy(InprocTransport):
    """Keeps what goes through the inner transport, and can say of a link that it was lost and has been made anew."""

    def __init__(self, network: InprocNetwork) -> None:
        super().__init__(network)
        self.sent: list[list[bytes]] = []
        self.lost: list[bytes] = []

    def recv(self, timeout):
        return (self.lost.pop(), []) if self.lost else super().recv(timeout)

    def send(self, peer, frames, priority=None):
        self.sent.append([bytes(frame) for frame in frames])
        super().send(peer, frames, priority)


class Ends:
    """A listener and another end that has a link to it, both shared; ``raw`` is an inner transport with a link."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        self.inner = Spy(self.network)
        self.back = Spy(self.network)
        self.listener = SharedMemoryTransport(self.back, "job")
        self.other = SharedMemoryTransport(self.inner, "job")
        self.listener.bind("inproc://here")
        self.link = self.other.connect("inproc://here")
        self.raw = self.network.transport()
        self.raw_link = self.raw.connect("inproc://here")

    def send(self, *frames: bytes) -> list[bytes]:
        self.other.send(self.link, frames)
        received = came(self.listener)
        assert self.other.recv(0) is None, "nothing but an answer to a hello"
        return received[1]

    def acquaint(self) -> None:
        self.send(b"head", BIG)
        self.inner.sent.clear()

    def close(self) -> None:
        self.listener.close()
        self.other.close()


def hello(*fields: object, kind: int = 1) -> bytes:
    """How an end says which arena it has, or answers that."""
    return bytes((0xC1, kind)) + msgpack.packb(list(fields))
