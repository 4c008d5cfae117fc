"""A trainer's parameters: what torch models give, as one list by key with a tensor per device. Pure."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import GeneratorType
from typing import Any, TypeAlias

import torch
from torch import nn

from kvstore import UsageError
from kvstore.plain import scalar
from kvstore.values import to_buffer
from workers.common.tensors import require_own_memory
from workers.common.values import module_of

Key: TypeAlias = "int | str"
Named: TypeAlias = "list[tuple[Key, torch.Tensor, bool]]"  # key, tensor, and whether the program gave the key
Order: TypeAlias = "list[tuple[Key, list[int], str, str]]"  # see ``order_of``


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        key: the key in the store.
        tensors: one per device.
        group: the position of the parameter's group.
        names: all names in the model. Tied weights have several; the first is the key.
        named: whether the program gave the key; otherwise it is the position in the model.
    """

    key: Key
    tensors: tuple[torch.Tensor, ...]
    group: int = 0
    names: tuple[Key, ...] = ()
    named: bool = True

    @property
    def trains(self) -> bool:
        return self.tensors[0].requires_grad

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, one per device. A device that has none is an error."""
        grads = [tensor.grad for tensor in self.tensors]
        if any(grad is None for grad in grads):
            if not self.trains:
                raise UsageError(
                    f"parameter {self.key!r} has no gradient, and requires none any more: freeze it on all workers at "
                    "the same step, and pass ignore_stale_grad=True from then on"
                )
            raise UsageError(
                f"parameter {self.key!r} has no gradient: call backward() before step(), and leave out parameters "
                "that the loss does not depend on; if that differs from step to step, pass ignore_stale_grad=True"
            )
        return [grad for grad in grads if grad is not None]


@dataclass(frozen=True)
class Collected:
    """A model's parameters, and the hyper-parameters of their groups; None if no groups were given.

    Attributes:
        everything: all parameters, in the order of the model; also frozen ones, which may be trained later.
    """

    everything: list[Parameter]
    groups: list[dict[str, Any]] | None = None

    @property
    def params(self) -> list[Parameter]:
        return [param for param in self.everything if param.trains]

    def by_key(self, factors: Mapping[Key, float]) -> dict[Key, float]:
        """Return ``factors`` by key; they may be given by any name of a parameter."""
        keys = {name: param.key for param in self.everything for name in param.names}
        return {keys.get(name, name): factor for name, factor in factors.items()}


def collect(params: Any) -> Collected:
    """Return the parameters in ``params``, each once.

    Args:
        params: the result of ``model.named_parameters()`` or ``model.parameters()``; a dict from name to tensor; a list
            of torch's parameter groups, dicts with ``params`` (one of the above) and hyper-parameters; or a list with
            one of all these for each device, whose n-th parameters belong together.
    """
    replicas = [_groups(replica) for replica in _replicas(params)]
    first = _listed(replicas[0])
    if not any(param.trains for param in first):
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
        replace(same[0], tensors=tuple(param.tensors[0] for param in same)) for same in zip(first, *others, strict=True)
    ]
    options = [options for options, _ in replicas[0]]
    return Collected(together, None if options == [None] else [dict(one or {}) for one in options])


def buffers_beside(params: Any) -> list[dict[str, torch.Tensor]]:
    """Return, for each device, the buffers of the modules whose ``parameters()`` or ``named_parameters()`` are given.

    Gluon has running statistics and constants among the parameters, so its trainer sends them. Torch's iterators leave
    buffers out; but they know their module, until they have been read. A list or a dict that was made of one does not.
    """
    if isinstance(params, list | tuple) and params:
        parts = list(params)
        if not any(isinstance(part, torch.Tensor) or _is_named(part) or _is_group(part) for part in parts):
            return [_buffers_beside(part) for part in parts]
    return [_buffers_beside(params)]


def modules_beside(params: Any) -> list[nn.Module]:
    """Return the modules whose ``parameters()`` or ``named_parameters()`` are given, and not read yet."""
    if (module := module_of(params)) is not None:
        return [module]
    if _is_group(params):
        return modules_beside(params["params"])
    return [module for part in params for module in modules_beside(part)] if isinstance(params, list | tuple) else []


def _buffers_beside(replica: Any) -> dict[str, torch.Tensor]:
    if isinstance(replica, GeneratorType):
        module, recurse = module_of(replica), bool(inspect.getgeneratorlocals(replica).get("recurse", True))
        return {} if module is None else dict(module.named_buffers(recurse=recurse))
    if _is_group(replica):
        return _buffers_beside(replica["params"])
    if not isinstance(replica, list | tuple):
        return {}
    found = [_buffers_beside(part) for part in replica]
    return {f"{number}.{name}": buffer for number, part in enumerate(found) for name, buffer in part.items()}


def grouped(collected: Collected, optimizer: torch.optim.Optimizer) -> Collected:
    position = {id(tensor): i for i, group in enumerate(optimizer.param_groups) for tensor in group["params"]}
    params: list[Parameter] = []
    for param in collected.everything:
        if param.trains and id(param.tensors[0]) not in position:
            raise UsageError(f"parameter {param.key!r} is in none of the optimizer's parameter groups")
        group = position.get(id(param.tensors[0]), 0)  # a frozen one may be in none
        params.append(replace(param, group=group))
    return Collected(params, [own_of(optimizer, group) for group in optimizer.param_groups])


def own_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of ``group`` that differ from the defaults of ``optimizer``."""
    return {
        name: value
        for name, value in group.items()
        if name in optimizer.defaults and _numbers(value) != _numbers(optimizer.defaults[name])
    }


def order_of(params: Sequence[Parameter]) -> Order:
    """Return what tells parameters without names apart, whose keys are positions: shape, dtype and, if need be, values.

    A digest of the values is made where several are of one shape and dtype; elsewhere it is empty.
    """
    unnamed = [param for param in params if not param.named]
    kinds = Counter((param.tensors[0].shape, param.tensors[0].dtype) for param in unnamed)
    order: Order = []
    for param in unnamed:
        tensor = param.tensors[0].detach()
        several = kinds[tensor.shape, tensor.dtype] > 1
        digest = hashlib.sha256(to_buffer(tensor.cpu().contiguous())).hexdigest() if several else ""
        order.append((param.key, list(tensor.shape), str(tensor.dtype), digest))
    return order


def require_order(
    saved: Sequence[Sequence[Any]], params: Sequence[Parameter], alike: Callable[[Key, Key], bool], path: object
) -> None:
    """Raise ``UsageError`` unless ``params`` are in the order of ``saved``. ``alike``: of two keys' states."""
    now = {key: (tuple(shape), dtype, digest) for key, shape, dtype, digest in order_of(params)}
    then = {key: (tuple(shape), dtype, digest) for key, shape, dtype, digest in saved}
    other = [key for key in then if key in now and then[key] != now[key]]
    advice = "pass model.named_parameters() to Trainer, so that states are found by name"
    if not other:
        first_of: dict[tuple[Any, ...], Key] = {}
        for key, kind in then.items():
            one = first_of.setdefault(kind, key)
            if one != key and not alike(one, key):
                raise UsageError(
                    f"{path} cannot be told to be of parameters in this order: {one!r} and {key!r} have no names, one "
                    f"shape, equal values and different states; {advice}"
                )
        return
    first = other[0]
    if now[first][:2] == then[first][:2] and not {then[key] for key in other} <= set(now.values()):
        raise UsageError(
            f"{path} cannot be told to be of parameters in this order: they have no names, several have the shape "
            f"{list(now[first][0])}, and their values have changed since it was saved. Load the "
            f"weights that were saved with it before the Trainer is made; for new runs, {advice}"
        )
    raise UsageError(
        f"{path} is of parameters without names in another order: parameter {first!r} was "
        f"{_described(then[first])}, and is {_described(now[first])}. Pass them in the order of the run that saved it; "
        f"for new runs, {advice}"
    )


def _described(kind: tuple[tuple[int, ...], str, str]) -> str:
    shape, dtype, digest = kind
    return f"{dtype.removeprefix('torch.')}{list(shape)}" + (f" with values of sha256 {digest[:8]}" if digest else "")


def _numbers(value: Any) -> Any:
    """Return ``value`` so that it can be compared: a rate may be a tensor."""
    return tuple(map(scalar, value)) if isinstance(value, tuple | list) else scalar(value)


def clear(tensor: torch.Tensor, set_to_none: bool) -> None:
    """Drop the gradient of ``tensor``, or set it to zero."""
    tensor.grad = None if set_to_none or tensor.grad is None else tensor.grad.detach().zero_()


def not_trained(
    params: Sequence[Parameter], frozen: Iterable[int], buffers: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Return, for each device, the parameters at the positions ``frozen`` and these ``buffers``, by name."""
    found = [
        {f"{params[position].key}": params[position].tensors[device] for position in frozen}
        for device in range(len(params[0].tensors))
    ]
    return [
        mine | {f"buffer {name}": buffer for name, buffer in theirs.items()}
        for mine, theirs in zip_longest(found, buffers, fillvalue=dict[str, torch.Tensor]())
    ]


def stale(params: Sequence[Parameter]) -> list[int]:
    """The positions of the parameters that have no gradient on any device."""
    return [i for i, param in enumerate(params) if all(tensor.grad is None for tensor in param.tensors)]


def _replicas(params: Any) -> list[Any]:
    if isinstance(params, Mapping) or _is_model(params):
        return [params]
    listed = list(params)
    if listed and all(not isinstance(item, torch.Tensor) and not _is_named(item) for item in listed):
        return [listed] if all(map(_is_group, listed)) else listed
    return [listed]


def _groups(replica: Any) -> list[tuple[dict[str, Any] | None, Named]]:
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
    names: dict[torch.Tensor, list[Key]] = {}
    given: dict[torch.Tensor, bool] = {}
    group_of: dict[torch.Tensor, int] = {}
    for position, (_, named) in enumerate(groups):
        for key, tensor, is_given in named:
            if group_of.setdefault(tensor, position) != position:
                raise UsageError(f"parameter {key!r} is in two parameter groups; leave it in one")
            names.setdefault(tensor, []).append(key)
            given.setdefault(tensor, is_given)
    all_names = [name for aliases in names.values() for name in aliases]
    if len(set(all_names)) < len(all_names):
        raise UsageError("two parameters have the same name; every parameter needs a name of its own")
    return [
        Parameter(aliases[0], (tensor,), group_of[tensor], tuple(aliases), given[tensor])
        for tensor, aliases in names.items()
    ]


def _signature(param: Parameter) -> tuple[Any, ...]:
    """What must be the same for the parameters of two devices that belong together."""
    return param.key, param.tensors[0].shape, param.group, param.names, param.trains


def _is_model(item: Any) -> bool:
    return isinstance(item, nn.Module) and not isinstance(item, nn.ParameterList)


def _is_named(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int)


def _is_group(item: Any) -> bool:
    return isinstance(item, dict) and "params" in item


def _named(replica: Iterable[Any] | Mapping[Any, torch.Tensor], first: int) -> Named:
    items = replica.items() if isinstance(replica, Mapping) else replica
    named: Named = []
    for item in items:
        is_given = _is_named(item)
        key, tensor = item if is_given else (first + len(named), item)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"a parameter must be a tensor, or a pair of a name and a tensor, not {type(item).__name__}"
            )
        require_own_memory({key: tensor})
        # The ``weight`` of workers.Embedding, which has nothing to train, takes no number either: states saved
        # when the module had no parameter have the numbers without it.
        if tensor.numel():
            named.append((key, tensor, is_given))
    return named
