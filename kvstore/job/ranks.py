"""The rank of a process that torchrun, mpirun or srun has started, from the variables that these set.

Each starter has variables of its own for the same four numbers. Where starters are nested, as torchrun within srun, a
process has the variables of both. The innermost starter counts, and ``FAMILIES`` is in that order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """The variables of one kind of starter: its name, and the variable for each number."""

    starter: str
    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = Family("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = Family(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = Family("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Not SLURM_NTASKS, which a batch script has too, though it is no task.
SRUN = Family("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
FAMILIES = (TORCHRUN, OPEN_MPI, MPICH, SRUN)

# Where cluster managers number their processes, and the number of the first. PMIx and SGE give no size beside it.
_MANAGER_RANKS = ((OPEN_MPI.rank, 0), ("PMIX_RANK", 0), (MPICH.rank, 0), (SRUN.rank, 0), ("SGE_TASK_ID", 1))


@dataclass(frozen=True)
class Ranks:
    """A process's rank among all that its starter has started.

    Attributes:
        family: the starter whose variables these are.
        rank, size: this process's rank, and the number of processes.
        local_rank, local_size: the same on its host; -1 and 0 where the starter does not say.
        master, port: ``MASTER_ADDR`` and ``MASTER_PORT``, where torch's processes meet; empty and 0 if not set.
        hosted: whether torchrun itself listens there; if not, rank 0 does.
        attempt: how often torchrun has restarted the processes.
    """

    family: Family
    rank: int
    size: int
    local_rank: int = -1
    local_size: int = 0
    master: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Ranks | None:
        """None if no starter has set its variables; ConfigError if they contradict each other."""
        for family in _said(env):
            rank, size = _number(env, family.rank, 0), _number(env, family.size, 0)
            if rank >= size:
                raise ConfigError(f"{family.rank}={rank} must be less than {family.size}={size}")
            master = env.get("MASTER_ADDR", "").strip()
            port = _number(env, "MASTER_PORT", 0)
            return cls(
                family,
                rank,
                size,
                _number(env, family.local_rank, -1),
                _local_size(env, family),
                master if 0 < port < 65536 else "",
                port if master and port < 65536 else 0,
                env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
            )
        return None

    @property
    def one_host(self) -> bool:
        """Whether all are known to be on one host."""
        return self.size == self.local_size or self.size == 1


def manager_rank(env: Mapping[str, str]) -> int:
    """Which of a cluster manager's processes this one is, counted from 0; -1 if the manager does not say."""
    by_pmix = env.get("PMIX_RANK", "")
    if by_pmix and by_pmix == env.get(SRUN.rank):  # srun --mpi=pmix; an mpirun around it may have set its own, too
        env = {SRUN.rank: by_pmix}
    for name, first in _MANAGER_RANKS:
        text = env.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text) - first
    return -1


def _said(env: Mapping[str, str]) -> list[Family]:
    """Return the families that ``env`` has variables of, the one that counts first.

    ``srun --mpi=pmi2`` and ``--mpi=pmix`` set PMI's or PMIx's rank beside Slurm's. The rank is the same then, but only
    Slurm's variables say which tasks share a host. Within an mpirun that starts its agents with srun, Slurm's variables
    belong to the agent, and the ranks differ.

    Raises:
        ConfigError: two starters give different ranks, and none of them can be the inner one.
    """
    said = [each for each in FAMILIES if env.get(each.rank, "").strip() and env.get(each.size, "").strip()]
    if not said or said[0] is TORCHRUN:
        return said
    first, by_pmix = said[0], env.get("PMIX_RANK", "").strip()
    of_srun = (env.get(SRUN.rank, "").strip(), env.get(SRUN.size, "").strip()) if SRUN in said else ("", "")
    if first is MPICH and of_srun[0] and not env.get(MPICH.local_rank, "").strip():  # mpirun of MPICH sets that
        if (env[MPICH.rank].strip(), env[MPICH.size].strip()) != of_srun:
            raise _contradiction(env, MPICH, SRUN)
        return [SRUN]
    if first is OPEN_MPI and by_pmix and by_pmix != env[OPEN_MPI.rank].strip():
        if by_pmix != of_srun[0]:
            raise _contradiction(env, OPEN_MPI, SRUN if of_srun[0] else None)
        return [SRUN]  # its variables came with srun's environment: the mpirun around it has set them
    if first is SRUN and by_pmix and by_pmix != of_srun[0]:
        raise _contradiction(env, SRUN, None)
    return said


def _contradiction(env: Mapping[str, str], one: Family, other: Family | None) -> ConfigError:
    names = [one.rank, one.size, *((other.rank, other.size) if other else ("PMIX_RANK",))]
    said = ", ".join(f"{name}={env[name]}" for name in names)
    return ConfigError(
        f"the environment gives this process two ranks: {said}. Some of these variables are of another starter than "
        "its own, around it perhaps: unset those (env -u NAME ...), or set DMLC_* or RANK, WORLD_SIZE, "
        "LOCAL_RANK and LOCAL_WORLD_SIZE, which count before all of these"
    )


def _local_size(env: Mapping[str, str], family: Family) -> int:
    text = env.get(family.local_size, "").strip()
    if family.local_size != "SLURM_STEP_TASKS_PER_NODE":
        return _number(env, family.local_size, 0)
    counts: list[int] = []
    for part in text.split(","):  # as "2(x3),1": three nodes with two tasks each, and one with one
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return 0
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 0


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not valid; valid: an integer, at least 0")
    return int(text) if text else default
