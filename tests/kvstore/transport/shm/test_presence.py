"""Presence: locks, names, and what is swept."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
from shared_memory import Begin, Make, files

from kvstore.errors import WireError
from kvstore.transport.shm import presence
from kvstore.transport.shm.presence import PeerPresence, Presence, sweep
from kvstore.transport.shm.shared_memory import Mapped

pytestmark = pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here")


def test_files_are_private_and_named_by_the_job(make: Make, directory: Path):
    mask = os.umask(0o777)
    try:
        arena = make()
        memory = arena.allocate(10)
    finally:
        os.umask(mask)
    assert memory is not None
    for number, path in enumerate(sorted(directory.iterdir())):
        assert path.name == f"{arena.presence.name}.{number}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "a hole is a SIGBUS to come"
    assert arena.presence.name.startswith(f"kvstore-{os.getuid()}-job-{os.getpid()}-")


def test_the_arenas_of_the_dead_are_swept_and_of_nobody_else(make: Make, directory: Path, begin: Begin):
    process = begin("a = Arena('j'); m = a.allocate(1); print(a.presence.name, flush=True); input()")
    dead = process.stdout.readline().strip()
    living = make().presence.name
    orphan = f"kvstore-{os.getuid()}-job-1-{'0' * 16}.7"
    uid = os.getuid()
    keep = [f"kvstore-{uid + 1}-job-1-{'0' * 16}.0", "kvstore-0-x", f"kvstore-{uid}-job-1-{'0' * 16}.0x", "else"]
    for name in [orphan, *keep]:
        (directory / name).touch(0o600)
    links = [f"kvstore-{uid}-job-1-{'1' * 16}.0", f"kvstore-{uid}-job-1-{'2' * 16}.1"]
    for link in links:
        (directory / link).symlink_to(directory / "else")
    assert sweep() == [orphan[:-2]], "the living are left alone"
    assert set(files(directory)) == {*keep, *links, f"{living}.0", f"{dead}.0", f"{dead}.1"}
    process.kill()
    process.wait()
    assert dead in sweep()
    assert set(files(directory)) == {*keep, *links, f"{living}.0"}


def test_a_file_of_another_mode_is_nobodys(make: Make, directory: Path):
    path = directory / f"kvstore-{os.getuid()}-job-1-{'0' * 16}.0"
    path.touch()
    path.chmod(0o644)
    assert sweep() == []
    assert path.exists()


def test_files_that_others_name_like_ours_cost_no_more_than_a_look(directory: Path, monkeypatch: pytest.MonkeyPatch):
    uid, looks = os.getuid() + 1, []
    names = [f"kvstore-{uid}-job-1-{number:016x}.{number % 2}" for number in range(20)]
    for name in names:
        (directory / name).touch(0o600)
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: [looks.append(path), real(path)][1])
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert sweep() == []
    assert looks == [directory]
    assert files(directory) == sorted(names)


def test_a_sweeper_between_the_making_and_the_locking(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever locks first has the file: the owner takes another name."""
    real, calls = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:  # the sweeper has come and gone
            for path in directory.iterdir():
                path.unlink()
        if len(calls) == 2:  # the sweeper is at it
            raise BlockingIOError
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    one = Presence("job")
    assert len(calls) == 3
    assert files(directory) == [f"{one.name}.0"]
    monkeypatch.undo()


def test_an_error_at_the_lock_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks"):
        Presence("job")
    assert files(directory) == []


def test_a_forked_child_neither_keeps_nor_removes_what_is_its_parents(directory: Path, begin: Begin):
    code = """
owner, reader = Arena("job"), Arena("job")
memory = owner.allocate(1000)
mapped = Mapped(owner.presence.name, owner.presence.nonce, reader.presence)
view = mapped.view(*owner.refer(memory, PeerPresence(reader.presence.name, reader.presence.nonce)))
read, write = os.pipe()
pid = os.fork()
if not pid:
    del view
    try:
        owner.allocate(1)
    except OSError as error:
        print(error.strerror, flush=True)
    owner.close()
    if os.fork():
        sys.exit()                      # with all that is done at exit
    print(os.getpid(), flush=True)
    os.read(read, 1)                    # outlives its parents, for it has the other end itself
    os._exit(0)
os.waitpid(pid, 0)
print(len(list(presence.DIRECTORY.iterdir())), owner.busy(memory), flush=True)
input()
"""
    process = begin(code)
    said = sorted(process.stdout.readline().strip() for _ in range(3))
    grandchild = next(int(line) for line in said if line.isdigit())
    assert "3 True" in said
    assert "this process's shared memory is closed" in said
    try:
        process.kill()
        process.wait()
        os.kill(grandchild, 0)
        assert len(sweep()) == 2, "a child that lives on is not the owner"
        assert files(directory) == []
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_process_that_ends_without_closing_leaves_nothing(directory: Path, begin: Begin):
    process = begin("arena = Arena('job'); memory = arena.allocate(1)")
    process.communicate()
    assert process.returncode == 0
    assert files(directory) == []


@pytest.mark.parametrize(
    "name",
    ["", "x", "../kvstore-0-job-1-0000000000000000", "kvstore-0-a/b-1-0000000000000000", "/etc/passwd"],
)
def test_a_name_that_is_none_is_refused(name: str):
    with pytest.raises(WireError, match="is not the name of an arena"):
        presence.open_peers(name, 0)


def test_only_files_that_our_processes_make_are_opened(make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch):
    owner = make()
    name = f"kvstore-{os.getuid()}-job-1-{'0' * 16}"
    path = directory / f"{name}.0"
    path.symlink_to(directory / f"{owner.presence.name}.0")
    with pytest.raises(WireError, match="cannot be opened: Too many levels"):
        presence.open_peers(name, 0)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(WireError, match="is not a file"):
        presence.open_peers(name, 0)
    path.unlink()
    path.write_bytes(b"x" * 5000)
    path.chmod(0o640)
    with pytest.raises(WireError, match="is not a file"):
        presence.open_peers(name, 0)
    path.chmod(0o600)
    os.close(presence.open_peers(name, 0)[0])
    with path.open("r+b") as file:
        file.truncate(1 << 20)  # with a hole
    with pytest.raises(WireError, match="is not a file"):
        presence.open_peers(name, 0)
    with pytest.raises(WireError, match="not the one that was announced"):
        PeerPresence(owner.presence.name, bytes(16))
    with pytest.raises(WireError, match="not the one that was announced"):
        PeerPresence(owner.presence.name, owner.presence.nonce[:15])
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(WireError, match="is not a file"):
        Mapped(owner.presence.name, owner.presence.nonce, owner.presence)
    monkeypatch.undo()
