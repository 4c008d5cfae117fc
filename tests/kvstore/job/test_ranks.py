"""Ranks from the environment: what torchrun, Open MPI, MPICH and Slurm say, as they really say it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.ranks import FAMILIES, Ranks, manager_rank

TORCH, OPENMPI, MPICH, SLURM = FAMILIES

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        (TORCHRUN, Ranks(TORCH, 3, 4, 1, 2, "node7", 29500, True, 2)),
        (MPIRUN, Ranks(OPENMPI, 1, 2, 1, 2)),
        (HYDRA, Ranks(MPICH, 0, 3, 0, 2)),
        (SRUN, Ranks(SLURM, 4, 5, 0, 1)),
        (SRUN | {"SLURM_NODEID": "1"}, Ranks(SLURM, 4, 5, 0, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, Ranks(SLURM, 4, 5, 0, 0)),
        (SRUN | TORCHRUN, Ranks(TORCH, 3, 4, 1, 2, "node7", 29500, True, 2)),
        (SRUN | MPIRUN, Ranks(OPENMPI, 1, 2, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Ranks(TORCH, 0, 2)),
        (MPIRUN | {"MASTER_ADDR": "node7", "MASTER_PORT": "5"}, Ranks(OPENMPI, 1, 2, 1, 2, "node7", 5)),
        (MPIRUN | {"MASTER_ADDR": "node7"}, Ranks(OPENMPI, 1, 2, 1, 2)),
        (MPIRUN | {"MASTER_PORT": "5"}, Ranks(OPENMPI, 1, 2, 1, 2)),
    ],
)
def test_what_each_says(env: dict[str, str], ranks: Ranks) -> None:
    assert Ranks.from_env(env) == ranks


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "captain"},
        {"WORLD_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a batch script
    ],
)
def test_who_has_no_rank(env: dict[str, str]) -> None:
    assert Ranks.from_env(env) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not valid"),
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK='-1' is not valid"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not valid"),
    ],
)
def test_what_cannot_be_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranks.from_env(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("env", "one_host"),
    [(TORCHRUN, False), (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, True), (MPIRUN, True), (HYDRA, False), (SRUN, False)],
)
def test_whether_all_are_on_one_host(env: dict[str, str], one_host: bool) -> None:
    ranks = Ranks.from_env(env)
    assert ranks is not None
    assert ranks.one_host == one_host


def test_settings_have_the_ranks_and_the_local_ones() -> None:
    config = Config.from_env(TORCHRUN)
    assert config.ranks == Ranks.from_env(TORCHRUN)
    assert (config.local_rank, config.local_size, config.in_job) == (1, 2, True)
    assert not Config().in_job


DMLC = {"DMLC_PS_ROOT_URI": "ipc:///x/scheduler", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


@pytest.mark.parametrize("explicit", [DMLC, DMLC | {"RANK": "nonsense"}, {"DMLC_ROLE": "server"}])
def test_a_job_that_is_described_goes_before_ranks(explicit: dict[str, Any]) -> None:
    config = Config.from_env(TORCHRUN | explicit)
    assert config.ranks is None
    assert config.local_rank == -1


def test_outside_of_all_the_error_says_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"neither torchrun, mpirun nor srun .* launch\.py -n 2 .* or torchrun "):
        Config().require_job("worker")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, -1),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"PMIX_RANK": "0"}, 0),
        ({"PMI_RANK": "12", "SLURM_PROCID": "0"}, 12),
        ({"SLURM_PROCID": "7"}, 7),
        ({"SGE_TASK_ID": "1"}, 0),
        ({"SGE_TASK_ID": "undefined"}, -1),
        ({"PMI_RANK": "", "SLURM_PROCID": "-1"}, -1),
        ({"PMI_RANK": "²"}, -1),
    ],
)
def test_each_manager_says_which_one_it_is_in_its_own_way(environ: dict[str, str], expected: int) -> None:
    assert manager_rank(environ) == expected
