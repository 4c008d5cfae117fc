"""An arena and its reader in one process, and processes that have arenas, for the tests of shared memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from kvstore.transport.shm.arena import Arena
from kvstore.transport.shm.presence import PeerPresence
from kvstore.transport.shm.shared_memory import Mapped

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
