"""``DistOpt``, after SINGA's: one call runs a backward pass, sends the gradients in some way, and updates.

dist_opt      ``DistOpt``
communicator  ranks, and sums over workers through one store, compressed or not
"""

from workers.dist_opt.dist_opt import DistOpt

__all__ = ["DistOpt"]
