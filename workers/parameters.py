"""The parameters that a Trainer trains: what torch models give, as one list by key, with a tensor per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvstore import UsageError


@dataclass(frozen=True)
class Parameter:
    """One parameter: its key in the store, and its tensors, one per device."""

    key: int | str
    tensors: tuple[torch.Tensor, ...]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, one per device.

        Raises:
            UsageError: there are none; the message says what that usually means.
        """
        grads = [tensor.grad for tensor in self.tensors]
        if any(grad is None for grad in grads):
            raise UsageError(
                f"parameter {self.key!r} has no gradient: call backward() before step(), and leave out parameters "
                "that the loss does not depend on"
            )
        return [grad for grad in grads if grad is not None]


def collect(params: Any) -> list[Parameter]:
    """Return the trainable parameters in ``params``.

    Args:
        params: what ``model.named_parameters()`` or ``model.parameters()`` gives, a dict from name to tensor, or a
            list with one of these for each device, whose n-th parameters belong together.

    Raises:
        UsageError: no parameters, a name twice, or devices whose parameters differ.
    """
    replicas = _replicas(params)
    named = [[(key, tensor) for key, tensor in _named(replica) if tensor.requires_grad] for replica in replicas]
    first = named[0]
    if not first:
        raise UsageError("there are no parameters that require a gradient")
    if len({key for key, _ in first}) < len(first):
        raise UsageError("two parameters have the same name")
    for other in named[1:]:
        if [(key, tensor.shape) for key, tensor in other] != [(key, tensor.shape) for key, tensor in first]:
            raise UsageError("the devices' models have different parameters")
    return [Parameter(key, tuple(replica[i][1] for replica in named)) for i, (key, _) in enumerate(first)]


def _replicas(params: Any) -> list[Any]:
    if isinstance(params, Mapping):
        return [params]
    listed = list(params)
    if listed and all(not isinstance(item, torch.Tensor) and not _is_named(item) for item in listed):
        return listed
    return [listed]


def _is_named(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int)


def _named(replica: Iterable[Any] | Mapping[Any, torch.Tensor]) -> list[tuple[int | str, torch.Tensor]]:
    items = replica.items() if isinstance(replica, Mapping) else replica
    named: list[tuple[int | str, torch.Tensor]] = []
    for number, item in enumerate(items):
        key, tensor = item if _is_named(item) else (number, item)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a parameter is a tensor, or a (name, tensor) pair, not {type(item).__name__}")
        named.append((key, tensor))
    return named
