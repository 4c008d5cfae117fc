"""The optimizer's states of some segments: out, to be saved, and in again, checked."""

from __future__ import annotations

import torch

from kvstore.errors import UsageError
from kvstore.spec import Key, Spec
from kvstore.values import from_buffer, to_buffer
from kvstore.wire import GetStates, OptimizerStates, PutStates, pack_arrays, unpack_arrays
from servers.store.buckets import Buckets
from servers.store.updates import Updates


def get_states(message: GetStates, buckets: Buckets, updates: Updates) -> OptimizerStates:
    """Return copies of the states that ``message`` asks for: updates change them in place."""
    for number in message.ids:
        buckets.find(number)
    updater = updates.updater
    states = updater.states.of(message.ids) if updater is not None else {}
    tensors = [value.detach().contiguous().clone() for value in states.values()]
    return OptimizerStates(
        message.seq,
        optimizer=updater.optimizer.rule if updater is not None else None,
        ids=[int(number) for number, _ in states],
        names=[name for _, name in states],
        shapes=[list(value.shape) for value in tensors],
        dtypes=[str(value.dtype).removeprefix("torch.") for value in tensors],
        buffers=pack_arrays([to_buffer(value) for value in tensors]),
    )


def put_states(message: PutStates, buckets: Buckets, updates: Updates) -> None:
    """Replace states by those that ``message`` brings.

    Raises:
        UsageError: there is no optimizer.
        Mismatch: the states are not those of this optimizer; nothing has changed.
    """
    updater = updates.updater
    if updater is None:
        raise UsageError("the servers have no optimizer to load states for; call set_optimizer first")
    weights: dict[Key, torch.Tensor] = {number: buckets.value(number) for number in dict.fromkeys(message.ids)}
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(message.shapes, message.dtypes, strict=True)]
    parts = unpack_arrays(message.buffers, [spec.nbytes for spec in specs])
    states: dict[tuple[Key, str], torch.Tensor] = {
        (number, name): from_buffer(part, spec.dtype).view(spec.shape)
        for number, name, spec, part in zip(message.ids, message.names, specs, parts, strict=True)
    }
    updates.regroup()
    updater.states.load(states, weights)
