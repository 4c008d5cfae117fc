"""``Copies``: the model on one or several devices of this process, each with its part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from kvstore import KVStore, UsageError
from workers.common.tensors import (
    as_real,
    fingerprint,
    has_parts,
    headroom,
    is_averaged,
    is_dense,
    overwrite,
    to_tensor,
)
from workers.embedding.modules import TableModule
from workers.reducer import Reducer

LossFunction = Callable[[Any, Any], torch.Tensor]


class BatchResult(NamedTuple):
    """The result of one device's part of a batch. ``outputs`` have no history; ``loss`` is the mean over the part."""

    labels: Any
    outputs: Any
    loss: torch.Tensor
    samples: int


class Copies:
    """The copies of a model. A ``Trainer`` keeps their parameters equal, and ``average_buffers`` their buffers."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device | str] | None = None) -> None:
        first = next(
            (param for param in model.parameters() if param.numel()), torch.empty(0, dtype=torch.float32, device="cpu")
        ).device
        self.traced: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext()
        self.devices = [torch.device(device) for device in devices or [first]]
        if len(self.devices) > 1 and any(isinstance(module, TableModule) for module in model.modules()):
            raise UsageError(
                f"workers.Embedding works with one device per process, and devices lists {len(self.devices)}: start a "
                "worker for each"
            )
        self.models = [model if devices is None else model.to(self.devices[0])]
        self.models += [_copied(model).to(device) for device in self.devices[1:]]

    def named_parameters(self) -> Any:
        named = [list(model.named_parameters()) for model in self.models]
        return named if len(named) > 1 else named[0]

    def table_stores(self, store: KVStore | None) -> list[KVStore]:
        modules = [module for module in self.models[0].modules() if isinstance(module, TableModule)]
        return list(dict.fromkeys(module.store for module in modules if module.store is not store))

    def train(self, mode: bool = True) -> None:
        for model in self.models:
            model.train(mode)

    def backward(self, inputs: Any, labels: Any, loss_function: LossFunction) -> list[BatchResult]:
        """Compute the gradients of the mean loss of each device's part of a batch.

        Gradients are scaled so that their mean over devices is the gradient of the batch's mean loss.
        """
        total, parts = samples_in(labels), []
        count = len(self.devices)
        if total < count:
            raise UsageError(
                f"a batch of {total} samples cannot be split over {count} devices: each needs one at least"
            )
        for number, (model, device) in enumerate(zip(self.models, self.devices, strict=True)):
            mine = slice(total * number // count, total * (number + 1) // count) if count > 1 else None
            x, y = to_device(inputs, device, mine), to_device(labels, device, mine)
            with self.traced("forward"):
                outputs = call(model, x)
                loss = loss_function(outputs, y)
            if loss.dim():
                raise UsageError(
                    f"the loss of a batch must be a scalar, the mean over samples, not of shape {list(loss.shape)}"
                )
            samples = samples_in(y)
            share = samples * count / total
            with self.traced("backward"):
                # Not times 1, which would be one more node in the graph of each batch.
                (loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
            parts.append(BatchResult(y, _detached(outputs), loss.detach(), samples))
        return parts

    @torch.no_grad()
    def forward(self, inputs: Any, labels: Any, loss_function: LossFunction) -> BatchResult:
        x, y = to_device(inputs, self.devices[0]), to_device(labels, self.devices[0])
        outputs = call(self.models[0], x)
        return BatchResult(y, outputs, loss_function(outputs, y), samples_in(y))

    @torch.no_grad()
    def average_buffers(self, reducer: Reducer) -> None:
        """Average buffers, such as batch-norm statistics, over devices and then over workers.

        What all devices have equal stays as it is, and what has no mean becomes the first device's; see ``Reducer``.
        """
        first, *others = [dict(model.named_buffers()) for model in self.models]
        for name, buffer in first.items() if others else ():
            same_name = [buffer, *(other[name] for other in others)]
            if is_averaged(buffer) and len({fingerprint(each) for each in same_name}) > 1:
                wide = [as_real(each).to("cpu", torch.float64) * headroom(len(same_name)) for each in same_name]
                mean = torch.stack(wide).sum(0) / len(wide) / headroom(len(wide))
                overwrite(buffer, torch.view_as_complex(mean) if buffer.is_complex() else mean)
        reducer.average_buffers(self.models[0])
        self._spread_buffers()

    def begin(self, reducer: Reducer) -> None:
        buffers = {name: buffer for name, buffer in self.models[0].named_buffers() if has_parts(buffer)}
        if buffers:
            reducer.broadcast(buffers)
            self._spread_buffers()

    def _spread_buffers(self) -> None:
        first = dict(self.models[0].named_buffers())
        for model in self.models[1:]:
            for name, buffer in model.named_buffers():
                if has_parts(buffer):
                    overwrite(buffer, first[name].to(buffer.device))

    def buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": buffer
            for number, model in enumerate(self.models)
            for name, buffer in model.named_buffers()
            if has_parts(buffer)
        }


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of ``model``; ``deepcopy`` of a CSR tensor fails in torch, and that of a quantized one warns."""
    memo: dict[int, Any] = {id(buffer): buffer.clone() for buffer in model.buffers() if not is_dense(buffer)}
    return deepcopy(model, memo)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call ``model`` with a batch's inputs: one tensor, several (tuple or list), or several by name (dict)."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def to_device(value: Any, device: torch.device, part: slice | None = None) -> Any:
    """Return the tensors on ``device``, or a ``part`` of each. Numpy arrays become tensors."""
    if isinstance(value, Mapping):
        return {name: to_device(element, device, part) for name, element in value.items()}
    if isinstance(value, tuple | list):
        return [to_device(element, device, part) for element in value]
    tensor = to_tensor(value)
    return (tensor if part is None else tensor[part]).to(device, non_blocking=True)


def samples_in(labels: Any) -> int:
    """The number of samples in a batch: the length of its labels."""
    return next((len(leaf) for leaf in leaves(labels)), 0)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        yield value
        return
    for element in value:
        yield from leaves(element)


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _detached(element) for name, element in value.items()}
    if isinstance(value, tuple | list):
        return [_detached(element) for element in value]
    return value.detach() if isinstance(value, torch.Tensor) else value
