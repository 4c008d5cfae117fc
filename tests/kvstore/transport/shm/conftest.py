"""Arenas in a directory of the test's own, and processes that have some."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shm_ends import ALONE, Ends, Make, Pair

from kvstore.transport.shm import arena as arenas
from kvstore.transport.shm import presence
from kvstore.transport.shm import shared_memory as shm
from kvstore.transport.shm.arena import FIRST_CHUNK, Arena


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of the test's own instead of /dev/shm itself."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        monkeypatch.setattr(presence, "DIRECTORY", Path(name))
        monkeypatch.setattr(arenas, "FIRST_CHUNK", 1 << 16)
        monkeypatch.setattr(shm, "noticed", threading.Lock())
        yield Path(name)


@pytest.fixture
def usual_chunks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas begin as large as elsewhere."""
    monkeypatch.setattr(arenas, "FIRST_CHUNK", FIRST_CHUNK)


@pytest.fixture
def ends(directory: Path, usual_chunks: None) -> Iterator[Ends]:
    """Ends of a link, which leave nothing behind."""
    made = Ends()
    yield made
    made.close()
    assert list(directory.iterdir()) == []


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Arena] = []

    def arena() -> Arena:
        made.append(Arena("job"))
        return made[-1]

    yield arena
    for one in made:
        one.close()


@pytest.fixture
def pair(make: Make) -> Pair:
    return Pair(make(), make())


@pytest.fixture
def begin(directory: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that runs the code."""
    with contextlib.ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", ALONE + code, directory]
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
