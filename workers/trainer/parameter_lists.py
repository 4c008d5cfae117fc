"""Keys, weights and gradients in the form that a store takes, optionally without some parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from kvstore import KVStore
from workers.trainer.parameters import Parameter

T = TypeVar("T")


class ParameterLists:
    """Lists of equal length, in the order of the parameters.

    Args:
        params: the parameters.
        memory: a store whose memory holds the gradients of CPU parameters, from the first ``zero_grad`` on; None for
            ordinary memory.
    """

    def __init__(self, params: list[Parameter], memory: KVStore | None) -> None:
        self._params = params
        self._keys = [param.key for param in params]
        self._weights = self._by_key([list(param.tensors) for param in params])
        self._shared: dict[torch.Tensor, torch.Tensor] = {}
        if memory is not None:
            self._shared = {
                tensor: memory.empty(tuple(tensor.shape), tensor.dtype)
                for param in params
                for tensor in param.tensors
                if tensor.is_cpu and tensor.requires_grad
            }

    def keys(self, left_out: Sequence[int] = ()) -> list[Any]:
        """Return the keys, without those at the positions ``left_out``."""
        return _without(self._keys, left_out)

    def weights(self, left_out: Sequence[int] = ()) -> list[Any]:
        """Return the parameters' tensors."""
        return _without(self._weights, left_out)

    def gradients(self, left_out: Sequence[int] = ()) -> list[Any]:
        """Return the gradients.

        Raises:
            UsageError: a parameter has none.
        """
        return self._by_key([param.gradients() for param in _without(self._params, left_out)])

    def zero_grad(self) -> None:
        """Set gradients in the store's memory to zero, and drop all others."""
        for param in self._params:
            for tensor in param.tensors:
                tensor.grad = self._shared.get(tensor)
                if tensor.grad is not None:
                    tensor.grad.zero_()

    def _by_key(self, tensors: list[list[torch.Tensor]]) -> list[Any]:
        """One value per key: a tensor if there is one device, which the store checks faster, else a list of tensors."""
        return [per_device[0] for per_device in tensors] if len(self._params[0].tensors) == 1 else tensors


def _without(items: list[T], left_out: Sequence[int]) -> list[T]:
    without = set(left_out)
    return [item for position, item in enumerate(items) if position not in without] if without else items
