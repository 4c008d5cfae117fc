"""Clipping by the norm of the gradient that all workers have together, as torch's ``clip_grad_norm_`` does in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore import UsageError
from workers.trainer.parameters import Parameter
from workers.trainer.peers import Peers


class Summed:
    """Whether gradients are sums over all workers already: those that ``allreduce_grads`` has left."""

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, int]] = []

    def note(self, params: Sequence[Parameter]) -> None:
        """Note that the gradients are sums now."""
        self._left = [(grad, grad._version) for param in params for t in param.tensors if (grad := t.grad) is not None]

    def clear(self) -> None:
        """Note that they are not any more."""
        self._left = []

    def hold(self, params: Sequence[Parameter]) -> bool:
        """Whether the gradients are those sums.

        Raises:
            UsageError: they have been changed since, by who knows what.
        """
        versions = {id(grad): version for grad, version in self._left}
        now = [grad for param in params for tensor in param.tensors if (grad := tensor.grad) is not None]
        kept = [grad for grad in now if id(grad) in versions]
        if not kept:
            self.clear()
            return False
        if len(kept) < len(now) or any(grad._version != versions[id(grad)] for grad in kept):
            raise UsageError(
                "gradients have changed since allreduce_grads(): call clip_grad_norm_() right after it, or before it"
            )
        return True


def clip(
    params: Sequence[Parameter], peers: Peers, summed: Summed, scale: float, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients in place so that their sum times ``scale`` has at most the norm ``max_norm``; return the norm.

    Args:
        params: whose gradients; what has none counts as zeros.
        peers: sums over all workers.
        summed: knows whether gradients are such sums already.
        scale: what the step will multiply the sum by.
        max_norm, norm_type: see ``torch.nn.utils.clip_grad_norm_``.
    """
    grads = [[torch.zeros_like(t) if t.grad is None else t.grad.detach() for t in param.tensors] for param in params]
    held = summed.hold(params)
    total = Peers(None).norm([its[:1] for its in grads], norm_type) if held else peers.norm(grads, norm_type)
    total = total * abs(scale)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for its in grads:
        for grad in its:
            by_device.setdefault(grad.device, []).append(grad)
    for device, its in by_device.items():
        torch._foreach_mul_(its, factor.to(device))
    if held:
        summed.note(params)
    return total
