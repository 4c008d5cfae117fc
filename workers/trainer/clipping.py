"""Clipping by the norm of the sum of all workers' gradients; torch's ``clip_grad_norm_`` does it for one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore import Unsupported, UsageError
from workers.common.sparse_gradients import is_sparse
from workers.common.torch_internals import multiply, write_count
from workers.trainer.parameters import Parameter
from workers.trainer.peers import Peers


class SummedGradients:
    """Knows whether gradients are already sums over all workers, which ``allreduce_grads`` leaves behind."""

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, int]] = []

    def note(self, params: Sequence[Parameter]) -> None:
        """Note that the gradients are sums now."""
        self._left = [
            (grad, write_count(grad)) for param in params for t in param.tensors if (grad := t.grad) is not None
        ]

    def clear(self) -> None:
        """Note that they are not sums any more."""
        self._left = []

    def hold(self, params: Sequence[Parameter]) -> bool:
        """Whether the gradients are those sums.

        Raises:
            UsageError: the sums have been changed since.
        """
        versions = {id(grad): version for grad, version in self._left}
        now = [grad for param in params for tensor in param.tensors if (grad := tensor.grad) is not None]
        kept = [grad for grad in now if id(grad) in versions]
        if not kept:
            self.clear()
            return False
        if len(kept) < len(now) or any(write_count(grad) != versions[id(grad)] for grad in kept):
            raise UsageError(
                "gradients have changed since allreduce_grads(): call clip_grad_norm_() right after it, or before it"
            )
        return True


def clip(
    params: Sequence[Parameter], peers: Peers, summed: SummedGradients, scale: float, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients in place so that their sum times ``scale`` has at most the norm ``max_norm``.

    Args:
        params: the parameters. One without a gradient counts as zeros.
        peers: sums over all workers.
        summed: knows whether the gradients are such sums already.
        scale: the factor that the step will apply to the sum.
        max_norm, norm_type: see ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before, a tensor without dimensions.

    Raises:
        Unsupported: a gradient is sparse.
    """
    for param in params:
        if any(map(is_sparse, param.tensors)):
            raise Unsupported(
                f"clip_grad_norm_() needs dense gradients, and that of {param.key!r} is sparse: make the layer with "
                "sparse=False, or do not clip"
            )
    grads = {
        param.key: [torch.zeros_like(t) if t.grad is None else t.grad.detach() for t in param.tensors]
        for param in params
    }
    held = summed.hold(params)
    firsts = {key: per_device[:1] for key, per_device in grads.items()}
    total = Peers(None).norm(firsts, norm_type) if held else peers.norm(grads, norm_type)
    total = total * abs(scale)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for per_device in grads.values():
        for grad in per_device:
            by_device.setdefault(grad.device, []).append(grad)
    for device, on_device in by_device.items():
        multiply(on_device, factor.to(device))
    if held:
        summed.note(params)
    return total
