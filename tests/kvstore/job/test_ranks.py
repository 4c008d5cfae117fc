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


# What Slurm's plugins for PMI-2 and PMIx add to the variables of srun.
PMI2 = SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_FD": "9", "PMI_JOBID": "7.0"}
PMIX = SRUN | {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.7.0"}


@pytest.mark.parametrize("env", [PMI2, PMIX, MPIRUN | PMIX], ids=["pmi2", "pmix", "pmix within mpirun"])
def test_srun_says_which_tasks_share_a_host_whatever_its_mpi_plugin_is(env: dict[str, str]) -> None:
    assert Ranks.from_env(env) == Ranks(SLURM, 4, 5, 0, 1)
    assert manager_rank(env) == 4
    one_node = env | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    ranks = Ranks.from_env(one_node)
    assert ranks is not None
    assert ranks.one_host


def test_an_mpirun_that_starts_its_agents_with_srun_counts_its_processes_itself() -> None:
    assert Ranks.from_env(SRUN | HYDRA) == Ranks(MPICH, 0, 3, 0, 2)
    assert Ranks.from_env(PMIX | HYDRA) == Ranks(MPICH, 0, 3, 0, 2)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (PMI2 | {"PMI_RANK": "1"}, "PMI_RANK=1, PMI_SIZE=5, SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5"),
        (PMI2 | {"PMI_SIZE": "8"}, "PMI_RANK=4, PMI_SIZE=8, SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5"),
        (MPIRUN | {"PMIX_RANK": "0"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, PMIX_RANK=0"),
        (SRUN | {"PMIX_RANK": "0"}, "SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5, PMIX_RANK=0"),
    ],
)
def test_two_ranks_of_which_none_can_be_the_inner_one_are_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"two ranks: {said}\. .* unset those"):
        Ranks.from_env(env)
    assert Ranks.from_env(env | TORCHRUN) == Ranks.from_env(TORCHRUN)


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
