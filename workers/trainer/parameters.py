"""The parameters that a Trainer trains: what torch models give, as one list by key, with a tensor per device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from kvstore import UsageError

Key: TypeAlias = "int | str"
Named: TypeAlias = "list[tuple[Key, torch.Tensor]]"


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        key: its key in the store.
        tensors: one per device.
        group: the position of its group.
        names: all names that it has in the model: tied weights have several, of which the first is the key.
    """

    key: Key
    tensors: tuple[torch.Tensor, ...]
    group: int = 0
    names: tuple[Key, ...] = ()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, one per device.

        Raises:
            UsageError: there are none; the message says what that usually means.
        """
        grads = [tensor.grad for tensor in self.tensors]
        if any(grad is None for grad in grads):
            raise UsageError(
                f"parameter {self.key!r} has no gradient: call backward() before step(), and leave out parameters "
                "that the loss does not depend on; if it depends on others at every step, pass ignore_stale_grad=True"
            )
        return [grad for grad in grads if grad is not None]


@dataclass(frozen=True)
class Collected:
    """What a Trainer was given: parameters, and the hyper-parameters of their groups (None: there are no groups)."""

    params: list[Parameter]
    groups: list[dict[str, Any]] | None = None

    def by_key(self, factors: Mapping[Key, float]) -> dict[Key, float]:
        """Return factors that were given by any name of a parameter by its key."""
        keys = {name: param.key for param in self.params for name in param.names}
        return {keys.get(name, name): factor for name, factor in factors.items()}


def collect(params: Any) -> Collected:
    """Return the trainable parameters in ``params``, each once.

    Args:
        params: what ``model.named_parameters()`` or ``model.parameters()`` gives, a dict from name to tensor, or a
            list of torch's parameter groups: dicts with ``params``, one of these, and hyper-parameters; or a list with
            one of all these for each device, whose n-th parameters belong together.

    Raises:
        UsageError: no parameters, a model in their place, a name twice, a tensor in two groups, or devices whose
            parameters differ.
    """
    replicas = [_groups(replica) for replica in _replicas(params)]
    first = _listed(replicas[0])
    if not first:
        raise UsageError("there are no parameters that require a gradient")
    others = [_listed(replica) for replica in replicas[1:]]
    for other in others:
        if [(*_shape(its), its.group, its.names) for its in other] != [(*_shape(p), p.group, p.names) for p in first]:
            raise UsageError("the devices' models have different parameters")
    together = [
        Parameter(same[0].key, tuple(its.tensors[0] for its in same), same[0].group, same[0].names)
        for same in zip(first, *others, strict=True)
    ]
    options = [options for options, _ in replicas[0]]
    return Collected(together, None if options == [None] else [dict(one or {}) for one in options])


def grouped(collected: Collected, optimizer: torch.optim.Optimizer) -> Collected:
    """Return ``collected`` with the parameter groups of ``optimizer``.

    Raises:
        UsageError: a parameter is in none of them.
    """
    position = {id(tensor): i for i, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    params: list[Parameter] = []
    for param in collected.params:
        if id(param.tensors[0]) not in position:
            raise UsageError(f"parameter {param.key!r} is in none of the optimizer's parameter groups")
        params.append(Parameter(param.key, param.tensors, position[id(param.tensors[0])], param.names))
    return Collected(params, [own_of(optimizer, group) for group in optimizer.param_groups])


def own_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs in ``group`` from the defaults of ``optimizer``."""
    return {
        name: value for name, value in group.items() if name in optimizer.defaults and value != optimizer.defaults[name]
    }


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
    """The parameters of one device by group, with the groups' options; None for those that are in no group."""
    if _is_model(replica):
        raise UsageError("a Trainer takes a model's parameters, not the model: pass model.named_parameters()")
    listed = [replica] if isinstance(replica, Mapping) else list(replica)
    if not listed or not all(map(_is_group, listed)):
        return [(None, _named(replica if isinstance(replica, Mapping) else listed, 0))]
    found: list[tuple[dict[str, Any] | None, Named]] = []
    count = 0
    for group in listed:
        its = group["params"]
        named = _named([its] if isinstance(its, torch.Tensor) else its, count)
        count += len(named)
        found.append(({key: value for key, value in group.items() if key not in ("params", "param_names")}, named))
    return found


def _listed(groups: Sequence[tuple[object, Named]]) -> list[Parameter]:
    """The parameters of one device that require a gradient, each once."""
    names: dict[torch.Tensor, list[Key]] = {}
    of: dict[torch.Tensor, int] = {}
    for position, (_, named) in enumerate(groups):
        for key, tensor in named:
            if not tensor.requires_grad:
                continue
            if of.setdefault(tensor, position) != position:
                raise UsageError(f"parameter {key!r} is in two groups")
            names.setdefault(tensor, []).append(key)
    every = [name for its in names.values() for name in its]
    if len(set(every)) < len(every):
        raise UsageError("two parameters have the same name")
    return [Parameter(its[0], (tensor,), of[tensor], tuple(its)) for tensor, its in names.items()]


def _shape(param: Parameter) -> tuple[Key, torch.Size]:
    return param.key, param.tensors[0].shape


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
            raise UsageError(f"a parameter is a tensor, or a (name, tensor) pair, not {type(item).__name__}")
        named.append((key, tensor))
    return named
