"""``DistOpt``, after SINGA's: one call runs a backward pass, sends the gradients in some way, and updates.

optimizer     ``DistOpt``
communicator  who the workers are, and sums over them
channel       an all-reduce through one store, compressed or not
"""

from workers.dist_opt.optimizer import DistOpt

__all__ = ["DistOpt"]
