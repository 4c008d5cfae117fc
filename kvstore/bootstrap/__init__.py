"""A job for processes that torchrun, mpirun or srun has started: ranks bring up all others.

job                from ranks to a job
meeting            how rank 0 tells the other ranks where the job is
job_address        what it tells them
job_servers        the scheduler and the servers, which rank 0 starts; aggregators, which a rank of their host starts
member_processes   starts processes through their supervisor, and waits for their end
server_supervisor  the process between, which ends them when the rank that has started them has ended
root_cause         what it says of a job that has failed
report             tells the scheduler that a member has ended
"""

from kvstore.bootstrap.job import joining

__all__ = ["joining"]
