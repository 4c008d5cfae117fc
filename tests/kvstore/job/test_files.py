"""Files of a job, and the private directories that hold them."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstore.errors import CheckpointError, ConfigError
from kvstore.job.curve_keys import ROOT, CurveKeys, Keyring, split_key
from kvstore.job.directory import make_private, require_private, temporary_root
from kvstore.job.files import read_manifest, replacing
from kvstore.job.place import FILE, JobPlace, ObservingPlace, address_and_key, running_jobs

# ---- files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("old")
    return path


def replace(path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text("new")


def require_alone(path: Path, content: str) -> None:
    assert path.read_text() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def failing_sync(number: int, error: BaseException) -> Callable[[int], None]:
    """An ``os.fsync`` whose ``number``-th call raises."""
    calls = iter(range(number))

    def fsync(fd: int) -> None:
        if next(calls) == number - 1:
            raise error

    return fsync


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def fsync(fd: int) -> None:
        about = os.fstat(fd)
        what = path.parent if stat.S_ISDIR(about.st_mode) else path
        steps.append((what.name, about.st_size if what is path else 0, path.read_text()))
        assert what is path or os.path.samestat(about, path.parent.stat())

    monkeypatch.setattr(os, "fsync", fsync)
    replace(path)
    assert steps == [("file", 3, "old"), (path.parent.name, 0, "new")]


def test_what_the_writer_has_put_in_place_of_the_draft_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    with replacing(path) as draft:
        other = draft.with_name("other")
        other.write_text("new")
        other.replace(draft)
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]
    require_alone(path, "new")


def test_a_file_that_was_not_there_is_created(tmp_path: Path) -> None:
    replace(tmp_path / "file")
    require_alone(tmp_path / "file", "new")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path: Path, error: BaseException) -> None:
    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    require_alone(path, "old")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk failed"), KeyboardInterrupt()])
@pytest.mark.parametrize(("step", "content"), [(1, "old"), (2, "new")])
def test_a_sync_that_fails_is_raised_and_leaves_one_file_whole(
    path: Path, step: int, content: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing_sync(step, error))
    with pytest.raises(type(error)):
        replace(path)
    require_alone(path, content)


def test_a_link_in_the_way_is_not_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.job.files.secrets.token_hex", lambda _: "guessed")
    (path.parent / ".file.guessed.part").symlink_to(path)
    with pytest.raises(FileExistsError):
        replace(path)
    assert path.read_text() == "old"


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        replace(tmp_path / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


CRASH = """
import os, sys
from pathlib import Path
from kvstore.errors import CheckpointError
from kvstore.job.files import read_manifest, replacing

step, path = sys.argv[1], Path(sys.argv[2])
syncs = []

def fsync(fd):
    syncs.append(fd)
    if step == f"sync {len(syncs)}":
        os._exit(9)

os.fsync = fsync
with replacing(path) as draft:
    draft.write_text("new")
    if step == "write":
        os._exit(9)
os._exit(9)
"""


@pytest.mark.parametrize(("step", "content"), [("write", "old"), ("sync 1", "old"), ("sync 2", "new"), ("end", "new")])
def test_a_process_that_dies_at_any_step_leaves_one_file_whole(path: Path, step: str, content: str) -> None:
    assert subprocess.run([sys.executable, "-c", CRASH, step, path], check=False).returncode == 9
    assert path.read_text() == content
    drafts = [entry for entry in path.parent.iterdir() if entry != path]
    assert len(drafts) == (content == "old")  # nobody was left to remove it


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_need_not_sync_directories(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing_sync(2, OSError(number, os.strerror(number))))
    replace(path)
    require_alone(path, "new")


def test_a_directory_that_cannot_be_read_is_enough(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(name: Path, flags: int, *mode: int) -> int:  # root may read all
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", denied)
        replace(path)
    require_alone(path, "new")


@pytest.mark.parametrize(("mode", "expected"), [({}, 0o640), ({"mode": 0o600}, 0o600)])
def test_the_mode_is_the_callers_less_the_umask(path: Path, mode: dict[str, int], expected: int) -> None:
    before = os.umask(0o027)
    try:
        with replacing(path, **mode) as draft:
            assert stat.S_IMODE(draft.stat().st_mode) == expected
            draft.write_text("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_manifest_is_read_if_it_is_there_and_not_too_long(path: Path) -> None:
    assert read_manifest(path, 3, "checkpoint") == b"old"
    with pytest.raises(CheckpointError, match="damaged: a manifest has at most 2 bytes"):
        read_manifest(path, 2, "checkpoint")
    with pytest.raises(CheckpointError, match=r"missing or unreadable .*: .* is no checkpoint"):
        read_manifest(path.parent / "manifest", 3, "checkpoint")


@pytest.mark.parametrize("how", ["a library", "Python"])
def test_what_cannot_be_written_is_named_by_its_own_path_whoever_writes(tmp_path: Path, how: str) -> None:
    path = tmp_path / "weights"
    path.write_text("old")

    def write() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with replacing(path) as draft:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            try:
                if how == "Python":
                    draft.write_bytes(bytes(10_000))
                else:
                    save_file({"w": np.zeros(10_000)}, draft)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(OSError, match="too large") as raised:
        write()
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, f"{path}")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


# ---- places of jobs, and the private directories that hold them


@dataclass(frozen=True)
class VisitingPlace(JobPlace):
    ROLE: ClassVar[str] = "visitor"
    VERB: ClassVar[str] = "visited"
    MADE_BY: ClassVar[str] = "a test"

    count: int = 0
    since: float = 0.0

    def curve_keys(self, root_key: str) -> CurveKeys:
        return CurveKeys.of_observer(self.key, root_key)


def written(file: Path, **changes: object) -> Path:
    VisitingPlace("ipc:///x/scheduler", count=3, since=2.5).write(file, durable=False)
    if changes:
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def test_further_fields_are_kept(tmp_path: Path) -> None:
    file = written(tmp_path / "place.json")
    assert VisitingPlace.read(file) == VisitingPlace("ipc:///x/scheduler", count=3, since=2.5)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "change", [{"count": True}, {"count": "3"}, {"since": None}, {"version": 2}, {"transport": "x"}]
)
def test_fields_of_another_kind_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not a file that this version's a test has written"):
        VisitingPlace.read(written(tmp_path / "place.json", **change))


def test_deeply_nested_text_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "place.json")
    file.write_text("[" * 60_000)
    with pytest.raises(ConfigError, match="not a file"):
        VisitingPlace.read(file)


def test_errors_name_the_role() -> None:
    with pytest.raises(ConfigError, match="a job is visited at ipc://path or tcp://host:port"):
        VisitingPlace("http://x")
    with pytest.raises(ConfigError, match="the key of visitors is not valid"):
        VisitingPlace("ipc:///x/scheduler", "key")


KEYRING = Keyring.random([ROOT, ("worker", 0)])
HERE = ObservingPlace("ipc:///x/scheduler", job="j", command="python train.py", pid=os.getpid(), workers=2, servers=1)
DEAD = 1 << 30  # no process has that number


def job_in(root: Path) -> Path:
    directory = make_private(root)
    HERE.write(directory / FILE, durable=False)
    return directory


def test_where_links_have_keys_observers_have_theirs() -> None:
    assert KEYRING.observer is not None
    address, key = address_and_key("10.0.0.1", 5555, KEYRING)
    assert split_key(address) == ("tcp://10.0.0.1:5555", KEYRING.pairs[ROOT][0])
    assert key == KEYRING.observer[1]
    place = ObservingPlace(address, key)
    keys = place.config({}).keys
    assert keys is not None
    assert (keys.public, keys.follows) == (KEYRING.observer[0], False)
    assert key not in repr(place)


@pytest.mark.parametrize("keyring", [None, KEYRING], ids=["plain", "keys"])
def test_a_private_directory_needs_no_key(keyring: Keyring | None) -> None:
    assert address_and_key("ipc:///x/scheduler", 0, keyring) == ("ipc:///x/scheduler", "")


def test_plain_links_have_no_key() -> None:
    assert address_and_key("::1", 5555, None) == ("tcp://[::1]:5555", "")


def test_a_running_job_is_found(tmp_path: Path) -> None:
    directory = job_in(tmp_path)
    make_private(tmp_path)  # of a process that no observer can ask
    assert list(running_jobs([tmp_path, tmp_path])) == [(directory, HERE)]
    assert list(running_jobs([tmp_path / "none"])) == []


def test_a_job_whose_launcher_is_dead_is_not_shown(tmp_path: Path) -> None:
    job_in(tmp_path).rename(tmp_path / f"kvstore-{os.getuid()}-{DEAD}-x")
    assert list(running_jobs([tmp_path])) == []


def test_another_users_job_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = job_in(tmp_path)
    mine = theirs.with_name(theirs.name.replace(f"kvstore-{os.getuid()}-", f"kvstore-{os.getuid() + 1}-"))
    theirs.rename(mine)  # it has this user's name, and belongs to another
    monkeypatch.setattr(os, "getuid", lambda: mine.stat().st_uid + 1)
    assert list(running_jobs([tmp_path])) == []


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory = job_in(elsewhere)
    (tmp_path / directory.name).symlink_to(directory)
    assert list(running_jobs([tmp_path])) == []


def test_a_directory_that_others_may_enter_is_not_trusted(tmp_path: Path) -> None:
    directory = job_in(tmp_path)
    directory.chmod(0o755)
    [(found, refused)] = running_jobs([tmp_path])
    assert found == directory
    assert isinstance(refused, ConfigError)
    assert "must belong to this user alone" in str(refused)


def test_a_file_that_others_may_read_is_not_trusted(tmp_path: Path) -> None:
    (job_in(tmp_path) / FILE).chmod(0o644)
    [(_, refused)] = running_jobs([tmp_path])
    assert "chmod 600" in str(refused)


LONG = "x" * 100


def test_a_directory_is_private_and_named_by_user_and_process(tmp_path: Path) -> None:
    directory = make_private(tmp_path)
    assert directory.parent == tmp_path
    assert directory.name.startswith(f"kvstore-{os.getuid()}-{os.getpid()}-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert make_private(tmp_path) != directory
    require_private(directory)


def test_a_root_that_is_not_there_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make .*/none: No such file.*set TMPDIR to a writable directory"):
        make_private(tmp_path / "none")


def test_sockets_fit_where_directories_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert temporary_root(Path("/short")) == Path("/short")
    assert temporary_root(Path("/") / LONG) == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    assert temporary_root() == Path("/short")
    monkeypatch.setattr(tempfile, "tempdir", f"/{LONG}")
    assert temporary_root() == Path("/tmp")


def test_the_longest_root_leaves_room_for_a_socket() -> None:
    fits = [n for n in range(1, 100) if temporary_root(Path("/" + "r" * n)) != Path("/tmp")]
    # A directory there, and 36 characters for the socket, must fit the 103 bytes that macOS allows.
    assert len(f"/{'r' * fits[-1]}/kvstore-{os.getuid()}-{os.getpid()}-12345678") + 36 == 103


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o720])
def test_a_directory_that_others_can_enter_is_not_trusted(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(directory)


def test_what_is_no_directory_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not on this host: No such file"):
        require_private(tmp_path / "none")
    file = tmp_path / "file"
    file.touch(mode=0o600)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(file)


def test_another_users_directory_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_private(tmp_path)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(directory)


def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(make_private(tmp_path))
    require_private(link)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_private(link, follow_symlinks=False)
