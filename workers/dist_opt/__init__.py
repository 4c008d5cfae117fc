"""DistOpt, SINGA's distributed optimizer: a step is a backward, a way to send its gradients, and an update."""

from workers.dist_opt.optimizer import DistOpt

__all__ = ["DistOpt"]
