"""``DistOpt``, after SINGA's: one call runs a backward pass, sends the gradients in some way, and updates."""

from workers.dist_opt.dist_opt import DistOpt

__all__ = ["DistOpt"]
