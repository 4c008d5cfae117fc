"""A job for processes that torchrun, mpirun or srun has started: rank 0 brings up the scheduler and the servers."""

from kvstore.bootstrap.job import joining

__all__ = ["joining"]
