"""The optimizer's states of some segments: out, to be saved, and in again, checked."""

from __future__ import annotations

import torch

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.optim.state_messages import SegmentState, pack_states, unpack_states
from kvstore.spec import Key
from servers.store.buckets import Buckets
from servers.store.updates import Updates


def get_states(message: wire.GetStates, buckets: Buckets, updates: Updates) -> wire.OptimizerStates:
    """Return copies of the states that ``message`` asks for: updates change them in place. Rows' go with the rows."""
    for number in message.ids:
        buckets.target(number)
    updater = updates.updater
    states = updater.states.of(message.ids) if updater is not None else {}
    copies = [SegmentState(int(number), name, value.detach().clone()) for (number, name), value in states.items()]
    return wire.OptimizerStates(
        message.seq, optimizer=updater.optimizer.rule if updater is not None else None, **pack_states(copies)
    )


def put_states(message: wire.PutStates, buckets: Buckets, updates: Updates) -> None:
    """Replace states by those that ``message`` brings.

    Raises:
        UsageError: there is no optimizer.
        Mismatch: the states are not those of this optimizer; nothing has changed.
    """
    updater = updates.updater
    if updater is None:
        raise UsageError("the servers have no optimizer to load states for; call set_optimizer first")
    weights: dict[Key, torch.Tensor] = {number: buckets.value(number) for number in dict.fromkeys(message.ids)}
    states: dict[tuple[Key, str], torch.Tensor] = {
        (number, name): value for number, name, value in unpack_states(message)
    }
    updates.regroup()
    updater.states.load(states, weights)
