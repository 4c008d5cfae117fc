"""A job for processes that torchrun, mpirun or srun has started: rank 0 brings up the scheduler and the servers.

job      from ranks to a job
meeting  where rank 0 tells the others of it
place    what they have to know
crew     rank 0's side of the scheduler and the servers
keeper   the process between, which ends them when rank 0 is gone
report   telling the scheduler that a member has ended
"""

from kvstore.bootstrap.job import joining

__all__ = ["joining"]
