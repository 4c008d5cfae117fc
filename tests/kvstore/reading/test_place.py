from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import kvstore as kv
from kvstore.errors import ConfigError
from kvstore.job.curve_keys import pair, with_key
from kvstore.reading.readers_file import ReadingPlace, find

SCHEDULER, READER = pair(), pair()
KEYED = with_key("tcp://10.0.0.1:5555", SCHEDULER[0])


def test_the_file_is_its_owners_alone_and_says_all(tmp_path: Path) -> None:
    file = tmp_path / "readers.json"
    place = ReadingPlace(KEYED, READER[1], "sockets")
    place.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ReadingPlace.read(file) == place
    assert find(file, None, {}) == place
    assert find(None, None, {"KVSTORE_READ_FROM": str(file)}) == place
    assert READER[1] not in repr(place)


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "readers.json"
    ReadingPlace(KEYED, READER[1]).write(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ReadingPlace.read(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 2}', '{"version": 1, "address": 3}', "\\xff"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "readers.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="--readers"):
        ReadingPlace.read(file)


def test_a_job_that_does_not_run_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does the job run"):
        find(tmp_path / "none", None, {})


def test_the_key_may_be_in_the_environment() -> None:
    assert find(KEYED, None, {"KVSTORE_READ_KEY": READER[1]}).key == READER[1]
    assert find(KEYED, READER[1], {}).key == READER[1]


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [
        ("http://10.0.0.1", "", "ipc://path or tcp://"),
        ("tcp://10.0.0.1:5555", READER[1], "both are needed"),
        (KEYED, "", "both are needed"),
        (KEYED, "secret", "not shown"),
    ],
    ids=["no endpoint", "no public key", "no secret key", "malformed key"],
)
def test_half_a_place_is_refused(address: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        ReadingPlace(address, key)
    assert "secret" not in str(refused.value).replace("the readers' secret key", "")


def test_nowhere_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="KVSTORE_READ_FROM"):
        find(None, None, {})


def test_a_readers_settings() -> None:
    config = ReadingPlace(KEYED, READER[1], "zeromq").config({"DMLC_ROLE": "worker", "KVSTORE_TIMEOUT_S": "7"})
    assert (config.role, config.root, config.transport, config.timeout_s) == ("reader", KEYED, "zeromq", 7.0)
    assert config.keys is not None
    assert (config.keys.public, config.keys.follows) == (READER[0], True)
    assert ReadingPlace("ipc:///x/scheduler").config({}).keys is None


def test_which_job_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_READ_FROM", raising=False)
    with pytest.raises(kv.ConfigError, match="which job"):
        kv.connect()


@pytest.mark.parametrize("store", [0, "worker", None, 1.5])
def test_stores_are_counted_from_1(tmp_path: Path, store: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"counted from 1.*'workers' is that of workers.init\(\)"):
        kv.connect(tmp_path / "readers.json", store=store)


def test_where_nobody_listens_there_is_no_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(kv.DeadlineExceeded, match="nobody listens"):
        kv.connect(f"ipc://{tmp_path}/scheduler", timeout=0.05)
