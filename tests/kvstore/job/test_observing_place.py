from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import split_key
from kvstore.job.directory import make_private
from kvstore.job.keyring import ROOT, Keyring
from kvstore.job.observing_place import FILE, ObservingPlace, address_and_key, running_jobs

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
