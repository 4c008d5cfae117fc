"""The values that are averaged in place of gradients: parameters and buffers by name. Pure."""

from __future__ import annotations

import gc
import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import itemgetter
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import nn

from kvstore import UsageError
from workers.common.tensors import has_parts, is_averaged, require_own_memory

log = logging.getLogger(__name__)


class Buffer(NamedTuple):
    """A module's buffer by its attribute, because an assignment replaces the tensor."""

    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.attribute)
        return tensor


def parameters_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters of ``optimizer`` by name, in the order of ``model``, each once."""
    names: dict[torch.Tensor, str] = {}
    for name, tensor in _named(model):
        names.setdefault(tensor, name)
    require_own_memory({name: tensor for tensor, name in names.items()})
    trained = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    for tensor in trained - names.keys():
        raise UsageError(
            f"the optimizer has a parameter of shape {list(tensor.shape)} that is not among the model's: pass the "
            "model, or the named_parameters(), that the optimizer was made for"
        )
    if not any(tensor.numel() for tensor in trained):
        raise UsageError("the optimizer has no parameters to average")
    return {name: tensor for tensor, name in names.items() if tensor in trained}


def module_of(params: Any) -> nn.Module | None:
    """Return the module that ``params`` is, or whose ``parameters()`` or ``named_parameters()`` it is, not read yet."""
    if isinstance(params, nn.Module):
        return params
    module = inspect.getgeneratorlocals(params).get("self") if isinstance(params, GeneratorType) else None
    return module if isinstance(module, nn.Module) else None


def buffers_around(params: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers of all modules that hold any of ``params``, and of modules inside these, by name."""
    place = {id(param): number for number, param in enumerate(params)}
    # An optimizer does not know its model, and a parameter does not know its module: only the garbage collector finds
    # them, in some 50 ms for a million objects.
    modules = [each for each in _everything_of(_subclasses(nn.Module)) if "_modules" in vars(each)]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in list(module._modules.values()):  # a copy, because other threads may be making their modules
            parents.setdefault(id(child), []).append(module)
    holders = {id(each): each for each in modules if any(id(one) in place for one in list(each._parameters.values()))}
    held = (id(param) for each in holders.values() for param in list(each._parameters.values()))
    hidden = place.keys() - set(held)
    if hidden and gc.get_freeze_count():  # which walks over all that is frozen
        log.warning(
            "the modules of %d parameters are not found, as after gc.freeze(): each worker keeps its own buffers of "
            "these, such as batch statistics; broadcast_parameters(model) sends rank 0's",
            len(hidden),
        )
    outer = list(holders.values())
    while outer:
        outer = [each for inner in outer for each in parents.get(id(inner), ()) if id(each) not in holders]
        holders |= {id(each): each for each in outer}
    # The collector's order is another one on each worker, and two models may be of one class. The optimizer's order of
    # parameters is the same everywhere.
    whole = [each for each in holders.values() if id(each) not in parents]
    whole.sort(key=lambda module: [place[id(param)] for param in module.parameters() if id(param) in place])
    kinds: Counter[str] = Counter()
    found: dict[str, torch.Tensor] = {}
    for module in whole:
        kind = type(module).__name__
        kinds[kind] += 1
        prefix = kind if kinds[kind] == 1 else f"{kind} {kinds[kind]}"
        found |= {f"{prefix}.{name}": buffer for name, buffer in module.named_buffers() if has_parts(buffer)}
    return dict(sorted(found.items()))


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set()
    new: list[Any] = [cls]
    while new:
        found.update(new)
        new = [sub for known in new for sub in type.__subclasses__(known) if sub not in found]
    return found


def _everything_of(types: set[type]) -> list[Any]:
    """Return all objects of exactly these types that the garbage collector knows.

    It knows tuples, too, that other threads are making just now. Such a thread gets a SystemError if somebody else has
    a reference to its tuple when it goes on, as a loop over ``gc.get_objects()`` would. So all of this is iterators in
    C: while ``list`` reads them, no other thread runs. ``cell`` has the object whose type is looked at; what keeps more
    of them, as ``tee`` does, is among them itself, and would never be freed.
    """
    cell: list[Any] = [None]

    def found() -> Iterator[Any]:
        objects = chain.from_iterable(map(gc.get_objects, (None,)))
        put, get = map(cell.__setitem__, repeat(0), objects), partial(map, cell.__getitem__, repeat(0))
        # type() and not isinstance, which reads __class__: a lazy module would be imported by that.
        return compress(map(itemgetter(1), zip(put, get(), strict=False)), map(types.__contains__, map(type, get())))

    return list(found())


def buffers_of(model: Any) -> dict[str, Buffer]:
    """Return the buffers of ``model`` that can be averaged, by name; none if it is not a module."""
    return {name: buffer for name, buffer in _buffers(model) if is_averaged(buffer.tensor)}


def other_buffers_of(model: Any) -> dict[str, Buffer]:
    """Return all other buffers of ``model``: counts, masks, codes, sparse matrices. They can only be one worker's."""
    return {name: buffer for name, buffer in _buffers(model) if not is_averaged(buffer.tensor)}


def module_or_dict(model: Any) -> nn.Module | dict[str, torch.Tensor]:
    """Return ``model``, which may be an iterator, in a form that can be read twice."""
    return model if isinstance(model, nn.Module) else dict(_named(model))


def everything_of(model: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(_named(model)) | {name: buffer.tensor for name, buffer in _buffers(model)}


def describe(values: Mapping[str, torch.Tensor]) -> str:
    """Return names, shapes and dtypes as a text, which is equal on workers whose values match."""
    return "\n".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in values.items())


def _buffers(model: Any) -> Iterator[tuple[str, Buffer]]:
    for prefix, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for name, tensor in module.named_buffers(recurse=False):
            if has_parts(tensor):  # else it has no values
                yield f"{prefix}.{name}" if prefix else name, Buffer(module, name)


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
        raise UsageError("two parameters have the same name; every parameter needs a name of its own")
    return named
