"""A job for processes that torchrun, mpirun or srun has started: rank 0 brings up the scheduler and the servers.

job                from ranks to a job
meeting            how rank 0 tells the other ranks where the job is
job_address        what it tells them
job_servers        starts the scheduler and the servers, and waits for their end
server_supervisor  the process between, which ends them when rank 0 has ended
root_cause         what it says of a job that has failed
report             tells the scheduler that a member has ended
"""

from kvstore.bootstrap.job import joining

__all__ = ["joining"]
