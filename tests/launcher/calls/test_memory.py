from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launcher.calls import memory


@pytest.fixture
def fd() -> Iterator[int]:
    made = memory.make()
    yield made
    os.close(made)


def test_what_was_written_is_read_from_the_beginning_by_each_reader(fd: int) -> None:
    os.write(fd, b"one two")
    with memory.view(fd) as first, memory.view(fd) as second:
        assert first.read(3) == b"one"
        assert second.read() == b"one two"
        assert first.read() == b" two"


def test_it_is_for_those_alone_who_inherit_it(fd: int) -> None:
    code = "import os, sys; os.pwrite(int(sys.argv[1]), b'theirs', 0)"
    argv = [sys.executable, "-S", "-c", code, str(fd)]
    assert subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 1
    subprocess.run(argv, pass_fds=(fd,), check=True)
    with memory.view(fd) as pages:
        assert pages.read() == b"theirs"


def test_where_the_system_has_no_such_memory_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = memory.make()
    os.write(fd, b"x")
    with memory.view(fd) as pages:
        assert pages.read() == b"x"
    os.close(fd)
