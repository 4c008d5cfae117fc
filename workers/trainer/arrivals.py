"""New values that have not arrived when a step ends: each module waits for its own, right before its forward pass.

The first layers need their values first and the last layers much later, so the forward pass hides communication that
backward could not hide (P3, Jayarajan et al. 2019; ByteScheduler, Peng et al. 2019). The module that owns a parameter
waits for it. If that module is never called, the nearest called module above it waits: ``MultiheadAttention``, for one,
uses its projection's weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvstore import UsageError
from kvstore.dynamo import outside_graphs
from kvstore.ticket import Ticket
from kvstore.values import from_buffer, spec_of, to_buffer
from workers.common.torch_internals import is_compiled
from workers.trainer.outside_writes import OutsideWrites


class Arrivals:
    """The values that are on their way to one model's parameters.

    The model's hooks keep this object alive: the next use of the model must get the values, also without a trainer.
    """

    def __init__(
        self, model: nn.Module, tensors: Sequence[torch.Tensor], share: bool, writes: OutsideWrites | None = None
    ) -> None:
        self._writes = writes
        self._model = model
        self._tensors = tensors
        self._share = share
        self._pending: dict[int, tuple[Ticket, torch.Tensor]] = {}
        self._called: set[nn.Module] = set()
        # First only to see which modules are called at all: one that is never called would never wait.
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Hook(self._note)) for module in model.modules()
        ]
        self.covered: frozenset[int] = frozenset()  # positions that some module waits for

    def __contains__(self, position: int) -> bool:
        """Whether the value of the parameter at ``position`` has not been taken yet."""
        return position in self._pending

    def begin(self) -> None:
        """Make the modules that have been called so far wait from now on."""
        self._remove()
        positions = {tensor: position for position, tensor in enumerate(self._tensors)}
        own: dict[nn.Module, list[int]] = {}
        below: dict[nn.Module, list[int]] = {}
        for above, module in _lineages(self._model):
            held = [positions[param] for param in module.parameters(recurse=False) if param in positions]
            line = [other for other in (*above, module) if other in self._called]
            if held and line:
                own.setdefault(line[-1], []).extend(held)
                for other in line:
                    below.setdefault(other, []).extend(held)
        for module, held in below.items():
            wait = _Hook(partial(self._wait, own.get(module, ()), held))
            # Before all other hooks: torch's prune, weight_norm and spectral_norm compute with the parameters.
            self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
        # ``state_dict`` reads parameters without a forward pass.
        settle = _Hook(lambda *_: self.settle())
        self._handles += [
            module.register_state_dict_pre_hook(settle)  # type: ignore[no-untyped-call]
            for module in self._model.modules()
        ]
        self.covered = frozenset(position for held in own.values() for position in held)

    def expect(self, ticket: Ticket, values: Mapping[int, torch.Tensor]) -> None:
        for position, value in values.items():
            self._pending[position] = ticket, value

    def take(self, positions: Iterable[int]) -> None:
        """Return when the parameters at ``positions`` have their values. If a push failed, they are still expected."""
        if not self._pending:
            return
        for position in positions:
            pending = self._pending.get(position)
            if pending is not None:
                ticket, value = pending
                ticket.wait()
                if self._writes is not None:
                    self._writes.require_none_of(position)
                del self._pending[position]
                write(self._tensors[position], value, self._share)
                if self._writes is not None:
                    self._writes.note_one(position)

    def settle(self) -> None:
        self.take(list(self._pending))

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._remove()

    def _note(self, module: nn.Module, _: Any) -> None:
        self._called.add(module)

    def _wait(self, own: Collection[int], below: Collection[int], module: nn.Module, _: Any) -> None:
        # Without gradients some modules use their children's parameters themselves, as torch's TransformerEncoderLayer.
        self.take(own if module.training and torch.is_grad_enabled() else below)

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


@outside_graphs
class _Hook:
    """A module's hook. Copies of the module get a hook that does nothing, as they have nothing to wait for."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def require_waiting(model: Any, tensors: Sequence[torch.Tensor], updates_there: bool) -> None:
    """Raise ``UsageError`` unless the forward passes of ``model`` can wait for ``tensors``."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"wait_in_forward must be the model, a torch.nn.Module, not {type(model).__name__}")
    if any(map(is_compiled, model.modules())):
        raise UsageError(
            "wait_in_forward needs modules that are called one by one, and a compiled model calls none: pass it "
            "uncompiled"
        )
    if not updates_there:
        raise UsageError(
            "wait_in_forward needs a dist store that updates (update_on_kvstore=True) and one device per process"
        )
    theirs = set(model.parameters())
    if not any(tensor in theirs for tensor in tensors):
        raise UsageError(
            "wait_in_forward: this model has none of the trainer's parameters; pass the model that is trained"
        )


def unshare_for_state_dict(model: nn.Module, tensors: Collection[torch.Tensor]) -> None:
    """Give each of ``tensors`` that has become a part of the store's memory a storage of its own in ``state_dict``.

    The memory stays the same. But ``torch.save`` writes whole storages, which hold many parameters here, and
    ``safetensors.torch.save_model`` refuses parameters that have one storage.
    """
    mine = set(tensors)

    def unshare(module: nn.Module, *_: Any) -> None:
        for tensor in module.parameters(recurse=False):
            if tensor in mine and tensor.is_cpu and tensor.untyped_storage().nbytes() > tensor.nbytes:
                flat = from_buffer(to_buffer(tensor.detach()), spec_of(tensor).dtype)
                tensor.data = flat.view(tensor.shape)

    for module in model.modules():
        module.register_state_dict_pre_hook(_Hook(unshare))  # type: ignore[no-untyped-call]


def write(tensor: torch.Tensor, value: torch.Tensor, share: bool) -> None:
    """Give ``tensor`` the value that arrived: by a copy, or with ``share`` and on the CPU by replacing its ``data``."""
    if share and tensor.is_cpu:
        tensor.data = value
    else:
        tensor.detach().copy_(value)


def _lineages(
    module: nn.Module, above: tuple[nn.Module, ...] = ()
) -> Iterable[tuple[tuple[nn.Module, ...], nn.Module]]:
    """Yield each module under ``module``, itself included, with the modules above it; once per path to it."""
    yield above, module
    for child in module.children():
        yield from _lineages(child, (*above, module))
