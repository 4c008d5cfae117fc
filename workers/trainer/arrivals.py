"""Values that are still on their way when a step ends: each module waits for its own, right before its forward pass.

The first layers are needed first and the last ones much later, so the forward pass hides what backward could not (P3,
Jayarajan et al. 2019; ByteScheduler, Peng et al. 2019). A parameter is its module's to wait for, if that is called at
all, else that of the nearest module above it that is: ``MultiheadAttention`` uses its projection's weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvstore import UsageError
from kvstore.ticket import Ticket


class Arrivals:
    """The values that one model's parameters are to have.

    Its hooks keep it alive, for whoever uses the model next must have the values, with or without a trainer.

    Args:
        model: whose forward passes wait.
        tensors: the parameters, by position.
        share: let a parameter's ``data`` become the value; see ``write``.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[torch.Tensor], share: bool) -> None:
        self._model = model
        self._tensors = tensors
        self._share = share
        self._pending: dict[int, tuple[Ticket, torch.Tensor]] = {}
        self._called: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Hook(self._note)) for module in model.modules()
        ]
        self.covered: frozenset[int] = frozenset()  # positions that some module waits for

    def __contains__(self, position: int) -> bool:
        """Whether the value of the parameter at ``position`` has not been taken yet."""
        return position in self._pending

    def begin(self) -> None:
        """Let modules wait from now on: those that have been called so far."""
        self._remove()
        positions = {tensor: position for position, tensor in enumerate(self._tensors)}
        own: dict[nn.Module, list[int]] = {}
        below: dict[nn.Module, list[int]] = {}
        for above, module in _lineages(self._model):
            its = [positions[param] for param in module.parameters(recurse=False) if param in positions]
            line = [other for other in (*above, module) if other in self._called]
            if its and line:
                own.setdefault(line[-1], []).extend(its)
                for other in line:
                    below.setdefault(other, []).extend(its)
        for module, its in below.items():
            wait = _Hook(partial(self._wait, own.get(module, ()), its))
            self._handles.append(module.register_forward_pre_hook(wait))
        settle = _Hook(lambda *_: self.settle())
        self._handles += [
            module.register_state_dict_pre_hook(settle)  # type: ignore[no-untyped-call]
            for module in self._model.modules()
        ]
        self.covered = frozenset(position for its in own.values() for position in its)

    def expect(self, ticket: Ticket, values: Mapping[int, torch.Tensor]) -> None:
        """Note that parameters are to have these values, by position, when ``ticket`` is done."""
        for position, value in values.items():
            self._pending[position] = ticket, value

    def take(self, positions: Iterable[int]) -> None:
        """Return when the parameters at ``positions`` have their values.

        Raises:
            KVStoreError: what has gone wrong with them; they are expected still.
        """
        if not self._pending:
            return
        for position in positions:
            found = self._pending.get(position)
            if found is not None:
                ticket, value = found
                ticket.wait()
                del self._pending[position]
                write(self._tensors[position], value, self._share)

    def settle(self) -> None:
        """Return when all parameters have their values."""
        self.take(list(self._pending))

    def close(self) -> None:
        """Return when all have theirs, and wait for no more."""
        try:
            self.settle()
        finally:
            self._remove()

    def _note(self, module: nn.Module, _: Any) -> None:
        self._called.add(module)

    def _wait(self, own: Collection[int], below: Collection[int], module: nn.Module, _: Any) -> None:
        # Without gradients some modules use the parameters of others, as torch's TransformerEncoderLayer does.
        self.take(own if module.training and torch.is_grad_enabled() else below)

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Hook:
    """A module's hook. In copies of the module it does nothing: they have nothing to wait for."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def require_waiting(model: Any, tensors: Sequence[torch.Tensor], updates_there: bool) -> None:
    """Raise ``UsageError`` unless the forward passes of ``model`` can wait for ``tensors``.

    Args:
        model: what the user has given.
        tensors: a trainer's parameters.
        updates_there: whether a dist store updates them, of one device.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"wait_in_forward is the model, a torch.nn.Module, not {type(model).__name__}")
    if any(map(_compiled, model.modules())):
        raise UsageError(
            "wait_in_forward needs modules that are called one by one, and those of a compiled model are not"
        )
    if not updates_there:
        raise UsageError("wait_in_forward needs a dist store that updates, and one device a process")
    theirs = set(model.parameters())
    if not any(tensor in theirs for tensor in tensors):
        raise UsageError("wait_in_forward is a model that has none of the trainer's parameters")


def _compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile``, ``Module.compile`` or ``torch.jit`` has made one program of it and all below it."""
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)


def write(tensor: torch.Tensor, value: torch.Tensor, share: bool) -> None:
    """Give ``tensor`` a value that has come; with ``share``, one on the CPU becomes it instead of a copy of it."""
    if share and tensor.is_cpu:
        tensor.data = value
    else:
        tensor.detach().copy_(value)


def _lineages(
    module: nn.Module, above: tuple[nn.Module, ...] = ()
) -> Iterable[tuple[tuple[nn.Module, ...], nn.Module]]:
    """Yield each module under ``module``, itself included, with all that lead to it; one with two ways, twice."""
    yield above, module
    for child in module.children():
        yield from _lineages(child, (*above, module))
