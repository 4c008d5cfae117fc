"""An optimizer's gradients by position, in the order of backward, as ``DistOpt`` sends them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstore import UsageError
from workers.common.checks import at_least
from workers.common.values import describe
from workers.dist_opt.channel import fuse


class OptimizerGradients:
    """The gradients of one optimizer. Its last parameters come first, which is the order of backward, and of SINGA.

    Args:
        opt: the optimizer.

    Attributes:
        params: its parameters.
        trained: the positions of the parameters that require a gradient.

    Raises:
        UsageError: no parameter requires a gradient.
    """

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self._opt = opt
        self.params = self._now()
        self.trained = _requiring(self.params)
        if not self.trained:
            raise UsageError(
                "the optimizer has no parameter that requires a gradient; give DistOpt one of a model that is trained"
            )

    def describe(self) -> str:
        """Return a text that is equal on workers whose parameters match."""
        return describe({f"{i} {i in self.trained}": param for i, param in enumerate(self.params)})

    def compute(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``; earlier gradients are dropped.

        Raises:
            UsageError: ``loss`` is not a tensor; the optimizer's parameters have changed; or a gradient is sparse.
        """
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss must be a tensor that was computed from the parameters, not {type(loss).__name__}")
        self._require_same()
        for param in self.params:
            param.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self._require_dense()

    def read(self) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return the gradients by position, and which there are.

        Returns:
            The gradients, zeros where there is none; and for every parameter 1 if it has a gradient, else 0.

        Raises:
            UsageError: the optimizer's parameters have changed; or a gradient is sparse.
        """
        self._require_same()
        self._require_dense()
        grads = {}
        for i in self.trained:
            grad = self.params[i].grad
            grads[i] = torch.zeros_like(self.params[i]) if grad is None else grad
        return grads, torch.tensor([param.grad is not None for param in self.params], dtype=torch.int32, device="cpu")

    def put(self, grads: Mapping[int, torch.Tensor], present: torch.Tensor) -> None:
        """Set the gradients whose ``present`` is not 0, and drop the others."""
        for i, grad in grads.items():
            self.params[i].grad = grad if present[i] else None

    def groups(self, threshold: int) -> list[list[int]]:
        """Return the positions of the gradients that share a message; see ``fuse``."""
        at_least("threshold", threshold, 0)
        fused = fuse([self.params[i].numel() for i in self.trained], threshold)
        return [[self.trained[j] for j in group] for group in fused]

    def _now(self) -> list[torch.Tensor]:
        return [param for group in self._opt.param_groups for param in group["params"]][::-1]

    def _require_same(self) -> None:
        params = self._now()
        if [*map(id, params)] != [*map(id, self.params)] or _requiring(params) != self.trained:
            raise UsageError(
                "the optimizer's parameters, or their requires_grad, have changed: make a new DistOpt, on all workers"
            )

    def _require_dense(self) -> None:
        for param in self.params:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of a parameter of shape {list(param.shape)} is sparse: create its layer with "
                    "sparse=False"
                )


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return values as one flat float32 tensor, on the device of the first."""
    return torch.cat([value.reshape(-1).to(values[0].device, torch.float32) for value in values])


def split_into(flat: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Write ``flat``, which has the layout of ``joined(values)``, back to ``values``."""
    start = 0
    for value in values:
        value.copy_(flat[start : start + value.numel()].view(value.shape))
        start += value.numel()


def _requiring(params: Sequence[torch.Tensor]) -> list[int]:
    return [i for i, param in enumerate(params) if param.requires_grad]
