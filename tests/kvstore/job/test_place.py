"""Places of jobs, and the private directories that hold them; ``tests/kvstore/reading/test_place.py`` has readers."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import ROOT, CurveKeys, Keyring, split_key
from kvstore.job.directory import make_private, require_private, temporary_root
from kvstore.job.place import FILE, JobPlace, ObservingPlace, address_and_key, running_jobs


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
