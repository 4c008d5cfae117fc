"""torch's threads in a member of a job: how many there are, and that those which wait do not keep their cores. No I/O.

A thread that has done its part of an operation spins for some milliseconds, so as to be there at once for the next one.
Meanwhile the other members on the host lack that core. torch's OpenMP reads its variables when it is loaded, and never
again: they have to be there before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.job.settings import OMP_NUM_THREADS, OMP_WAIT_POLICY

# Of GCC's OpenMP, which torch's wheels for Linux bring; there it goes before the policy.
SPINCOUNT = "GOMP_SPINCOUNT"
# A user that sets one of these has decided how threads wait: the standard's, GCC's, and LLVM's and Intel's.
WAITING = (OMP_WAIT_POLICY.name, SPINCOUNT, "KMP_BLOCKTIME")
# Some 25 us instead of 8 ms: from one operation of a model to the next, but not until a server answers. GCC's OpenMP
# takes this number by itself where one process has more threads than cores; of other processes it does not know.
WORKER_SPINS = 1000


def variables(env: Mapping[str, str], role: str, cores: int = 0, siblings: int = 1) -> dict[str, str]:
    """The variables to add to the environment of a member, before torch is imported there."""
    if role == "scheduler":
        return {}  # it does without torch
    made = {}
    if not any(env.get(name) for name in WAITING):
        made[OMP_WAIT_POLICY.name] = OMP_WAIT_POLICY.default
        if role == "worker":
            made[SPINCOUNT] = str(WORKER_SPINS)
    if role == "aggregator":  # it works on pieces, where to wake a sleeping thread takes longer than its part
        cores = 1
    if cores and not env.get(OMP_NUM_THREADS.name):
        made[OMP_NUM_THREADS.name] = str(max(1, cores // max(1, siblings)))
    return made
