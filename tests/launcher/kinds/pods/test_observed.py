from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvstore.job.contract import members
from kvstore.job.curve_keys import CurveKeys, split_key
from kvstore.job.keyring import ROOT, Keyring
from kvstore.job.observing_place import FILE, ObservingPlace, running_jobs
from launcher.kinds.pods.observed import observers_variables

PLAIN = {
    "DMLC_ROLE": "scheduler",
    "DMLC_PS_ROOT_URI": "10.0.0.7",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def test_observers_in_the_pod_find_the_job(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path) == {}
    [(directory, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert (place.address, place.key, place.workers, place.servers) == ("tcp://10.0.0.7:9091", "", 2, 1)
    assert stat.S_IMODE((directory / FILE).stat().st_mode) == 0o600


def test_they_have_a_key_of_their_own_which_the_scheduler_knows(tmp_path: Path) -> None:
    keyring = Keyring.random(members(2, 1))
    env = PLAIN | keyring.variables(*ROOT)
    told = observers_variables(env, tmp_path)
    [(_, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert split_key(place.address)[1] == keyring.pairs[ROOT][0]
    keys = CurveKeys.from_env(env | told)
    observer = place.config({}).keys
    assert keys is not None
    assert observer is not None
    assert keys.observer == observer.public
    assert place.key not in "".join(told.values())


@pytest.mark.parametrize("env", [PLAIN | {"DMLC_PS_ROOT_PORT": "x"}, {"DMLC_ROLE": "scheduler"}], ids=["bad", "none"])
def test_settings_that_are_wrong_are_the_schedulers_to_tell(env: dict[str, str], tmp_path: Path) -> None:
    assert observers_variables(env, tmp_path) == {}
    assert list(running_jobs([tmp_path])) == []


def test_where_nothing_is_writable_there_are_no_observers(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path / "none") == {}
