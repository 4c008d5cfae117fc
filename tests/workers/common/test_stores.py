"""Which store ``kvstore=`` means."""

from __future__ import annotations

import pytest

import kvstore as kv
from workers.common.stores import open_store, store_type

STARTED_BY = [
    {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
]


def test_auto_is_this_process_alone_outside_of_a_job() -> None:
    assert store_type("auto") == store_type("Auto") == "device"
    store = open_store("auto")
    assert (store.type, store.num_workers) == ("device", 1)


@pytest.mark.parametrize("variables", STARTED_BY, ids=["launch.py", "torchrun", "mpirun", "srun"])
def test_auto_is_synchronous_in_a_job(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert store_type("auto") == "dist_sync"
    assert store_type("local") == "local"


def test_other_names_are_what_kvstore_has_under_them() -> None:
    assert store_type("dist_async") == "dist_async"
    with pytest.raises(kv.UnknownName, match="choose from"):
        open_store("pigeon")


def test_a_store_is_used_as_it_is() -> None:
    store = kv.create("local")
    assert open_store(store) is store
    assert store_type(store) == "local"
