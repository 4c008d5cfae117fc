"""``DistOpt``, after SINGA's: one call runs a backward pass, sends the gradients in some way, and updates.

optimizer     ``DistOpt``
communicator  ranks, and sums over workers through one store, compressed or not
"""

from workers.dist_opt.optimizer import DistOpt

__all__ = ["DistOpt"]
