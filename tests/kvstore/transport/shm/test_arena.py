"""Shared memory of an owner: who gets which block, and locks and names that say that the owner is there."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_ends import Begin, Make, Pair, files

from kvstore.errors import WireError
from kvstore.transport.shm import arena as arenas
from kvstore.transport.shm import presence
from kvstore.transport.shm.arena import Arena, Blocks, rounded
from kvstore.transport.shm.presence import CELLS, PeerPresence, Presence, sweep
from kvstore.transport.shm.shared_memory import Mapped

# ---- the owner's side of shared memory: who gets which block, and when it is free again


pytestmark = pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50_000), st.integers(0, 1 << 30)), max_size=60))
def test_nothing_is_used_again_before_everybody_has_let_go(steps):
    """Views here, references on the way and views at the reader keep the bytes that were sent."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "DIRECTORY", Path(name))
        patch.setattr(arenas, "FIRST_CHUNK", 1 << 16)
        owner, reader = Arena("job"), Arena("job")
        pair = Pair(owner, reader)
        mine, sent, held = [], [], []
        for number, (what, nbytes, choice) in enumerate(steps):
            if what == 0:
                memory = owner.allocate(nbytes)
                memory[:] = bytes([number]) * nbytes
                mine.append((number, memory))
            elif what == 1 and mine:
                number, memory = mine.pop(choice % len(mine))
                part = memory[choice % len(memory) :]
                sent.append((number, len(part), owner.refer(part, pair.reader)))
                del memory, part
            elif what == 2 and sent:
                number, length, reference = sent.pop(choice % len(sent))
                held.append((number, pair.mapped.view(*reference)))
                assert len(held[-1][1]) == length
            elif what == 3 and held:
                del held[choice % len(held)]
            for number, view in mine + held:
                assert view[0] == view[-1] == number
        for number, length, reference in sent:
            view = pair.mapped.view(*reference)
            assert bytes(view) == bytes([number]) * length
        view = memory = part = mine = sent = held = None
        usage = owner.usage()
        assert (usage.free, usage.free_cells, usage.references) == (sum(usage.chunks), CELLS, 0)
        owner.close()
        reader.close()


def test_memory_is_reused_and_does_not_grow(pair: Pair):
    for _ in range(2000):
        memory = pair.owner.allocate(20_000)
        view = pair.carry(memory)
        del memory, view
    usage = pair.owner.usage()
    assert (len(usage.chunks), usage.blocks) == (1, 1)


def test_a_block_that_is_sent_again_and_again_keeps_few_cells(pair: Pair):
    memory = pair.owner.allocate(20_000)
    for _ in range(CELLS + 100):
        pair.carry(memory)
    assert pair.owner.usage().references < 100


def test_references_run_out_and_come_back(pair: Pair):
    memory = pair.owner.allocate(64)
    sent = [pair.owner.refer(memory, pair.reader) for _ in range(CELLS)]
    assert pair.owner.refer(memory, pair.reader) is None
    pair.mapped.view(*sent[7])
    assert pair.owner.refer(memory, pair.reader) == sent[7]


def test_busy_is_until_the_last_view_at_a_reader_is_dropped(pair: Pair):
    memory = pair.owner.allocate(1000)
    assert not pair.owner.busy(memory)
    reference = pair.owner.refer(memory[100:200], pair.reader)
    assert pair.owner.busy(memory)
    view = pair.mapped.view(*reference)
    part = view[5:6]
    del view
    assert pair.owner.busy(memory)
    del part
    assert not pair.owner.busy(memory)
    assert not pair.owner.busy(memory[5:])
    assert pair.owner.busy(bytearray(5)), "nobody can know"
    pair.owner.lend(memory[5:])
    assert pair.owner.busy(memory)
    del memory
    assert not pair.owner.busy(pair.owner.allocate(1000)), "somebody else's now"


def test_what_is_not_in_the_arena_is_copied_once(pair: Pair):
    view = pair.carry(bytearray(b"x" * 1000))
    assert bytes(view) == b"x" * 1000
    assert bytes(pair.carry(view)) == b"x" * 1000, "another's memory is not ours"


def test_threads_share_an_arena(pair: Pair):
    errors = []

    def work(seed: int) -> None:
        try:
            for turn in range(300):
                memory = pair.owner.allocate(1000 * (1 + (turn + seed) % 5))
                memory[:] = bytes([seed]) * len(memory)
                view = pair.carry(memory)
                del memory
                assert set(view) == {seed}
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sum(pair.owner.usage().chunks) <= 1 << 18


def test_views_outlive_the_arena_on_both_sides(pair: Pair, directory: Path):
    memory = pair.owner.allocate(10_000)
    memory[:] = b"x" * 10_000
    view = pair.carry(memory)
    pair.owner.close()
    pair.mapped = None
    pair.owner = None
    gc.collect()
    assert bytes(memory) == bytes(view) == b"x" * 10_000
    assert len(list(directory.iterdir())) == 1, "the reader's"


def test_a_closed_arena_gives_nothing(make: Make):
    arena = make()
    arena.close()
    with pytest.raises(OSError, match="closed"):
        arena.allocate(1)


def test_a_full_directory_is_an_error_and_leaves_nothing(make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch):
    arena = make()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            arena.allocate(100)
    with pytest.raises(OSError, match="No space left"):
        Presence("job")
    gc.collect()
    assert [path.suffix for path in directory.iterdir()] == [".0"]


def test_where_there_is_little_room_chunks_are_smaller(make: Make, monkeypatch: pytest.MonkeyPatch):
    arena = make()
    monkeypatch.setattr(arenas, "FIRST_CHUNK", 16 << 20)
    monkeypatch.setattr(arenas, "room", lambda: (4 << 20, 4 << 20))
    arena.allocate(100)
    assert arena.usage().chunks == (2 << 20,)
    arena.allocate(3 << 20)
    assert arena.usage().chunks == (2 << 20, 3 << 20)


def test_the_memory_that_a_killed_reader_held_comes_back(make: Make, begin: Begin):
    owner = make()
    code = """
reader = Arena("job")
name, nonce, *references = input().split()
mapped = Mapped(name, bytes.fromhex(nonce), reader.presence)
print(reader.presence.name, reader.presence.nonce.hex(), flush=True)
held = [mapped.view(*map(int, input().split())) for _ in range(3)]
print("held", flush=True)
input()                                 # the fourth, which is on its way
input()
"""
    process = begin(code)
    process.stdin.write(f"{owner.presence.name} {owner.presence.nonce.hex()}\n")
    process.stdin.flush()
    name, nonce = process.stdout.readline().split()
    reader = PeerPresence(name, bytes.fromhex(nonce))
    for _ in range(4):
        reference = owner.refer(owner.allocate(10_000), reader)
        process.stdin.write(" ".join(map(str, reference)) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    owner.allocate(10_000)
    assert owner.usage().blocks == 5
    assert reader.lives()
    process.kill()
    process.wait()
    assert not reader.lives()
    owner.allocate(60_000)
    assert len(owner.usage().chunks) == 1, "what the dead held is used before more is taken"
    owner.drain(20.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000), st.randoms(use_true_random=False)), max_size=60))
def test_blocks_never_overlap_and_all_come_back(steps):
    blocks, total, taken = Blocks(), 0, []
    for take, nbytes, random in steps:
        size = rounded(nbytes)
        if take:
            block = blocks.take(size)
            if block is None:
                blocks.grow(total, max(size, 1 << 16))
                total += 1
                block = blocks.take(size)
            assert (block.size, block.offset % 64) == (size, 0)
            assert all(
                other.chunk != block.chunk
                or other.offset + other.size <= block.offset
                or block.offset + block.size <= other.offset
                for other in taken
            )
            taken.append(block)
        elif taken:
            blocks.give(taken.pop(random.randrange(len(taken))))
        for block in taken:
            assert blocks.find(block.chunk, block.offset) is block
            assert blocks.find(block.chunk, block.offset + block.size - 1) is block
    for block in taken:
        blocks.give(block)
    whole = blocks.free
    sizes = {}
    while (block := blocks.take(64 << 10)) is not None:  # chunks grow together again: each has room for one of these
        sizes[block.chunk] = sizes.get(block.chunk, 0) + block.size
    assert sorted(sizes) == list(range(total))
    assert blocks.free == whole - sum(sizes.values())


def test_a_size_that_was_asked_for_before_gets_the_same_memory_and_the_lowest_first():
    blocks = Blocks()
    blocks.grow(0, 1 << 20)
    first, second, other = blocks.take(640), blocks.take(640), blocks.take(128)
    for block in (first, other, second):
        blocks.give(block)
    assert blocks.take(640) is first
    assert blocks.take(640) is second


def test_the_smallest_hole_that_fits_is_taken():
    blocks = Blocks()
    blocks.grow(0, 1 << 16)
    blocks.grow(1, 1 << 14)
    assert blocks.take(1 << 12).chunk == 1
    assert blocks.take(1 << 15).chunk == 0
    assert blocks.find(5, 0) is None
    assert blocks.take(1 << 20) is None


def test_chunks_that_are_not_used_any_more_are_given_back(pair: Pair, directory: Path):
    first = pair.owner.allocate(1000)
    held = pair.mapped.view(*pair.owner.refer(first, pair.reader))
    burst = [pair.owner.allocate(100_000) for _ in range(8)]
    views = [pair.mapped.view(*pair.owner.refer(each, pair.reader)) for each in burst]
    pair.owner.trim()
    pair.owner.trim()
    assert sum(pair.owner.usage().chunks) > 800_000, "they are in use"
    files = len(list(directory.iterdir()))
    del burst, views
    pair.owner.trim()
    assert sum(pair.owner.usage().chunks) > 800_000, "what was used since the last time may be used again"
    pair.owner.trim()
    assert sum(pair.owner.usage().chunks) == 1 << 16
    assert len(list(directory.iterdir())) < files
    first[:] = b"x" * 1000
    assert bytes(held) == b"x" * 1000
    again = pair.owner.allocate(300_000)
    again[:] = b"y" * 300_000
    assert bytes(pair.mapped.view(*pair.owner.refer(again, pair.reader))) == b"y" * 300_000


def test_blocks_of_sizes_that_nobody_asks_for_any_more_make_room_for_others():
    blocks = Blocks()
    blocks.grow(0, 1 << 30)
    kept = []
    for step in range(2000):
        again = blocks.take(1 << 16)  # of each step
        other = blocks.take(rounded((1 << 16) + 4096 * (1 + step)))
        kept.append((again.offset, other.offset + other.size))
        blocks.give(again)
        blocks.give(other)
    assert len({offset for offset, _ in kept}) == 1, "the same size has the same memory in each step"
    assert max(stop for _, stop in kept) < 6 * (2000 << 12), "a few blocks, not all sizes, which are 8 GB"


# ---- presence: locks, names, and what is swept


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
    "name", ["", "x", "../kvstore-0-job-1-0000000000000000", "kvstore-0-a/b-1-0000000000000000", "/etc/passwd"]
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
