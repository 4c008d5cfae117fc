from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from viewed_job import PLACE

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import pair, with_key
from kvstore.job.directory import make_private
from kvstore.job.place import FILE
from kvstore.observing.choice import NoSuchJob, jobs_here, place_at, place_named

OTHER = dataclasses.replace(PLACE, job="k", pid=43)


@pytest.mark.parametrize("wanted", ["43", "k"])
def test_a_job_is_named_by_its_pid_or_its_name(wanted: str) -> None:
    assert place_named(wanted, [PLACE, OTHER]) == OTHER


def test_the_running_jobs_are_listed_if_none_is_meant() -> None:
    with pytest.raises(NoSuchJob, match=r"no job here is '7'; running: 42 \(j\), 43 \(k\)"):
        place_named("7", [PLACE, OTHER])
    with pytest.raises(NoSuchJob, match="more than one job here is '43'"):
        place_named("43", [OTHER, OTHER])


def test_a_directory_or_a_copy_of_its_file_will_do(tmp_path: Path) -> None:
    PLACE.write(tmp_path / FILE)
    assert place_named(str(tmp_path), []) == PLACE
    assert place_named(str(tmp_path / FILE), []) == PLACE
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        place_named(str(tmp_path), [])


def test_this_users_jobs_are_found_where_temporary_files_are(tmp_path: Path) -> None:
    for place in (PLACE, dataclasses.replace(OTHER, started=5.0)):
        place.write(make_private(tmp_path) / FILE)
    untrusted = make_private(tmp_path)
    PLACE.write(untrusted / FILE)
    untrusted.chmod(0o750)
    places, refused = jobs_here([tmp_path])
    assert [place.pid for place in places] == [43, 42], "the latest first"
    assert [line.partition(":")[0] for line in refused] == [str(untrusted)]


def test_a_job_elsewhere_takes_an_address_and_a_key(tmp_path: Path) -> None:
    root, own = pair(), pair()
    file = tmp_path / "key"
    file.write_text(f"{own[1]}\n")
    file.chmod(0o600)
    address = with_key("tcp://10.0.0.1:5555", root[0])
    assert place_at(address, file).key == own[1]
    assert place_at("tcp://10.0.0.1:5555", None).key == ""
    with pytest.raises(ConfigError, match="both are needed"):
        place_at(address, None)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        place_at(address, file)


def test_a_file_without_a_key_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    address = with_key("tcp://10.0.0.1:5555", pair()[0])
    with pytest.raises(ConfigError, match="cannot be read"):
        place_at(address, file)
    for content in (b"hunter2", b"\xff\xfe"):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match="40 characters") as refused:
            place_at(address, file)
        assert "hunter2" not in str(refused.value)
