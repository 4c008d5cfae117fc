"""What is averaged when gradients are not: an optimizer's parameters and a model's buffers, by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from kvstore import UsageError


class Buffer(NamedTuple):
    """Where a module has a buffer; one that is assigned anew is another tensor."""

    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """It, as it is now."""
        its: torch.Tensor = getattr(self.owner, self.attribute)
        return its


def parameters_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters of ``optimizer`` by name, in the order of ``model``, each once.

    Args:
        model: a module, or what ``named_parameters()`` gives, or a dict from name to parameter.
        optimizer: its parameters count, whether they require a gradient now or not.

    Raises:
        UsageError: the optimizer has a parameter that the model has not, a name is used twice, or there is nothing.
    """
    names: dict[torch.Tensor, str] = {}
    for name, tensor in _named(model):
        names.setdefault(tensor, name)
    trained = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    for tensor in trained - names.keys():
        raise UsageError(
            f"the optimizer has a parameter of shape {list(tensor.shape)} that is not among the model's: pass the "
            "model, or the named_parameters(), that the optimizer was made for"
        )
    if not any(tensor.numel() for tensor in trained):
        raise UsageError("there are no parameters to average")
    return {name: tensor for tensor, name in names.items() if tensor in trained}


def buffers_of(model: Any) -> dict[str, Buffer]:
    """Return the floating-point buffers of ``model`` by name; none, if it is no module. Counts are left out."""
    found: dict[str, Buffer] = {}
    for prefix, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for name, tensor in module.named_buffers(recurse=False):
            if tensor.is_floating_point():
                found[f"{prefix}.{name}" if prefix else name] = Buffer(module, name)
    return found


def describe(values: Mapping[str, torch.Tensor]) -> str:
    """Return names, shapes and dtypes as a text that is the same for workers that can average."""
    return "\n".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in values.items())


def _named(model: Any) -> Sequence[tuple[str, torch.Tensor]]:
    if isinstance(model, nn.Module):
        return list(model.named_parameters())
    items = model.items() if isinstance(model, Mapping) else model
    named: list[tuple[str, torch.Tensor]] = []
    for item in items if isinstance(items, Iterable) else [items]:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)):
            raise UsageError(f"pass a module, or its named_parameters(), not {type(item).__name__}")
        named.append((str(item[0]), item[1]))
    if len({name for name, _ in named}) < len(named):
        raise UsageError("two parameters have the same name")
    return named
