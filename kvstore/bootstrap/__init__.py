"""A job for processes that torchrun, mpirun or srun has started: ranks bring up all others."""

from kvstore.bootstrap.job import joining

__all__ = ["joining"]
