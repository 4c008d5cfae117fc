"""A trainer's parameters: what torch models give, as one list by key with a tensor per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from kvstore import UsageError
from kvstore.plain import scalar

Key: TypeAlias = "int | str"
Named: TypeAlias = "list[tuple[Key, torch.Tensor]]"


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        key: the key in the store.
        tensors: one per device.
        group: the position of the parameter's group.
        names: all names in the model. Tied weights have several; the first is the key.
    """

    key: Key
    tensors: tuple[torch.Tensor, ...]
    group: int = 0
    names: tuple[Key, ...] = ()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, one per device.

        Raises:
            UsageError: a device has none. The message says what that usually means.
        """
        grads = [tensor.grad for tensor in self.tensors]
        if any(grad is None for grad in grads):
            raise UsageError(
                f"parameter {self.key!r} has no gradient: call backward() before step(), and leave out parameters "
                "that the loss does not depend on; if that differs from step to step, pass ignore_stale_grad=True"
            )
        return [grad for grad in grads if grad is not None]


@dataclass(frozen=True)
class Collected:
    """A trainer's parameters, and the hyper-parameters of their groups; None if no groups were given."""

    params: list[Parameter]
    groups: list[dict[str, Any]] | None = None

    def by_key(self, factors: Mapping[Key, float]) -> dict[Key, float]:
        """Return ``factors`` by key; they may be given by any name of a parameter."""
        keys = {name: param.key for param in self.params for name in param.names}
        return {keys.get(name, name): factor for name, factor in factors.items()}


def collect(params: Any) -> Collected:
    """Return the trainable parameters in ``params``, each once.

    Args:
        params: the result of ``model.named_parameters()`` or ``model.parameters()``; a dict from name to tensor; a list
            of torch's parameter groups, dicts with ``params`` (one of the above) and hyper-parameters; or a list with
            one of all these for each device, whose n-th parameters belong together.

    Raises:
        UsageError: there are no parameters, or a model in their place; a name is used twice; a tensor is in two groups;
            or the devices' parameters differ.
    """
    replicas = [_groups(replica) for replica in _replicas(params)]
    first = _listed(replicas[0])
    if not first:
        raise UsageError(
            "no parameters that require a gradient: pass model.named_parameters() of a model that is trained"
        )
    others = [_listed(replica) for replica in replicas[1:]]
    for other in others:
        if [_signature(param) for param in other] != [_signature(param) for param in first]:
            raise UsageError(
                "the devices' models have different parameters: names, shapes, groups and their order must be the same"
            )
    together = [
        Parameter(same[0].key, tuple(param.tensors[0] for param in same), same[0].group, same[0].names)
        for same in zip(first, *others, strict=True)
    ]
    options = [options for options, _ in replicas[0]]
    return Collected(together, None if options == [None] else [dict(one or {}) for one in options])


def grouped(collected: Collected, optimizer: torch.optim.Optimizer) -> Collected:
    """Return ``collected`` with the parameter groups of ``optimizer``.

    Raises:
        UsageError: a parameter is in none of the groups.
    """
    position = {id(tensor): i for i, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    params: list[Parameter] = []
    for param in collected.params:
        if id(param.tensors[0]) not in position:
            raise UsageError(f"parameter {param.key!r} is in none of the optimizer's parameter groups")
        params.append(Parameter(param.key, param.tensors, position[id(param.tensors[0])], param.names))
    return Collected(params, [own_of(optimizer, group) for group in optimizer.param_groups])


def own_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of ``group`` that differ from the defaults of ``optimizer``."""
    return {
        name: value
        for name, value in group.items()
        if name in optimizer.defaults and _numbers(value) != _numbers(optimizer.defaults[name])
    }


def _numbers(value: Any) -> Any:
    """Return ``value`` so that it can be compared: a rate may be a tensor."""
    return tuple(map(scalar, value)) if isinstance(value, tuple | list) else scalar(value)


def stale(params: Sequence[Parameter]) -> list[int]:
    """Return the positions of the parameters that have no gradient on any device."""
    return [i for i, param in enumerate(params) if all(tensor.grad is None for tensor in param.tensors)]


def _replicas(params: Any) -> list[Any]:
    if isinstance(params, Mapping) or _is_model(params):
        return [params]
    listed = list(params)
    if listed and all(not isinstance(item, torch.Tensor) and not _is_named(item) for item in listed):
        return [listed] if all(map(_is_group, listed)) else listed
    return [listed]


def _groups(replica: Any) -> list[tuple[dict[str, Any] | None, Named]]:
    """Return one device's parameters by group, with the group's options; None as options if there are no groups."""
    if _is_model(replica):
        raise UsageError("a Trainer takes a model's parameters, not the model: pass model.named_parameters()")
    listed = [replica] if isinstance(replica, Mapping) else list(replica)
    if not listed or not all(map(_is_group, listed)):
        return [(None, _named(replica if isinstance(replica, Mapping) else listed, 0))]
    groups: list[tuple[dict[str, Any] | None, Named]] = []
    count = 0
    for group in listed:
        params = group["params"]
        named = _named([params] if isinstance(params, torch.Tensor) else params, count)
        count += len(named)
        groups.append(({key: value for key, value in group.items() if key not in ("params", "param_names")}, named))
    return groups


def _listed(groups: Sequence[tuple[object, Named]]) -> list[Parameter]:
    """Return one device's parameters that require a gradient, each once."""
    names: dict[torch.Tensor, list[Key]] = {}
    group_of: dict[torch.Tensor, int] = {}
    for position, (_, named) in enumerate(groups):
        for key, tensor in named:
            if not tensor.requires_grad:
                continue
            if group_of.setdefault(tensor, position) != position:
                raise UsageError(f"parameter {key!r} is in two parameter groups; leave it in one")
            names.setdefault(tensor, []).append(key)
    all_names = [name for aliases in names.values() for name in aliases]
    if len(set(all_names)) < len(all_names):
        raise UsageError("two parameters have the same name; every parameter needs a name of its own")
    return [Parameter(aliases[0], (tensor,), group_of[tensor], tuple(aliases)) for tensor, aliases in names.items()]


def _signature(param: Parameter) -> tuple[Any, ...]:
    """What must be the same for the parameters of two devices that belong together."""
    return param.key, param.tensors[0].shape, param.group, param.names


def _is_model(item: Any) -> bool:
    return isinstance(item, nn.Module) and not isinstance(item, nn.ParameterList)


def _is_named(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int)


def _is_group(item: Any) -> bool:
    return isinstance(item, dict) and "params" in item


def _named(replica: Iterable[Any] | Mapping[Any, torch.Tensor], first: int) -> Named:
    items = replica.items() if isinstance(replica, Mapping) else replica
    named: Named = []
    for number, item in enumerate(items, first):
        key, tensor = item if _is_named(item) else (number, item)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"a parameter must be a tensor, or a pair of a name and a tensor, not {type(item).__name__}"
            )
        named.append((key, tensor))
    return named
