"""The internals of torch that this package uses: one function each, which says what is missing if torch changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence, Sized
from copy import copy
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kvstore import Unsupported
from kvstore.dynamo import outside_graphs


def write_count(tensor: torch.Tensor) -> int:
    """Return how many in-place writes torch has counted; writes through ``.data`` or numpy do not count."""
    try:
        return tensor._version
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} has no Tensor._version, which shows whether a gradient has changed; use a "
            "version that has it, or Trainer with overlap=False"
        ) from None


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    at_once = getattr(torch, "_foreach_mul_", None)
    if at_once is not None:
        at_once(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat copy of tensors of one dtype and device, back to back; in one call where torch can."""
    at_once = getattr(torch._C._nn, "flatten_dense_tensors", None)
    flat: torch.Tensor = torch.cat([tensor.reshape(-1) for tensor in tensors]) if at_once is None else at_once(tensors)
    # Of a single tensor torch returns a view.
    return flat.clone() if len(tensors) == 1 and at_once is not None else flat


@outside_graphs
def after_backward(act: Callable[[], None]) -> None:
    """Call ``act`` when the backward pass that runs now has ended; DistributedDataParallel and FSDP do the same."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:
        raise Unsupported(
            f"torch {torch.__version__} has no callback for the end of backward, which DistributedOptimizer needs; use "
            "a version that has it, or workers.Trainer"
        )
    if _ending.acts is not None:
        _ending.acts.append(act)
    else:
        queue(_AtEnd(act))


@outside_graphs
class _AtEnd:
    """What is queued for the end of a backward pass.

    Compiled autograd (torch 2.13) never calls what was queued while it ran. It drops it, right before ``backward``
    returns. So there the call is made when the last reference goes, and an error waits for ``raise_late``.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        self._compiled = getattr(compiled, "in_compiled_autograd_region", False)
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def __del__(self) -> None:
        if not self._compiled:  # a backward pass that has failed
            return
        acts: list[Callable[[], None]] = [self]
        _ending.acts = acts
        try:
            for act in acts:  # what is queued meanwhile, too
                act()
        except Exception as exc:
            _late.append(exc)
        finally:
            _ending.acts = None


class _Ending(threading.local):
    acts: list[Callable[[], None]] | None = None  # while a backward pass ends in ``_AtEnd.__del__``


_ending = _Ending()
_late: list[Exception] = []  # raised at the end of a backward pass, where the program could not see them


def raise_late() -> None:
    """Raise the error of an ``after_backward`` that was called where it could not raise it."""
    if _late:
        error = _late[0]
        _late.clear()
        raise error


def current_backward() -> int:
    """A number of the backward pass that runs in this thread; -1 if none does."""
    try:
        return int(torch._C._current_graph_task_id())
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} does not tell which backward pass runs, which workers.Embedding needs to push "
            "once in each; use a version that does"
        ) from None


def in_backward_node() -> bool:
    """Whether this thread runs a node of a backward pass, with its hooks; not what is called when that has ended."""
    try:
        return torch._C._current_autograd_node() is not None
    except AttributeError:
        raise Unsupported(
            f"torch {torch.__version__} does not tell which node of a backward pass runs, so nobody knows when DDP's "
            "buckets are due; use a version that does, or workers.DistributedOptimizer"
        ) from None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile``, ``Module.compile`` or ``torch.jit`` has compiled ``module`` with all its parts."""
    compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)


def set_in_group(group: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Set ``name`` in one of ``param_groups``. A tensor that is there is filled, as torch's schedulers do.

    The program may go on filling the tensor. With another object in its place, that would silently change nothing.
    """
    now = group.get(name)
    if isinstance(now, torch.Tensor) and now.is_floating_point():
        with torch.no_grad():
            now.fill_(value)
    else:
        group[name] = value


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's schedulers that ``optimizer`` has made a step; without it they warn that none came before theirs.

    A version of torch that looks elsewhere warns without need; nothing else depends on it.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def loader_on_stack() -> Any:
    """Return the iterator of a ``DataLoader`` that is calling; None if the program itself is.

    Nothing else tells a sampler for whom it is read, and a loader that reads ahead looks like a program that uses much.
    A version of torch whose loaders cannot be seen here counts what they take as used.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames and isinstance(found := frame.f_locals.get("self"), _BaseDataLoaderIter):
            return found
        frame = frame.f_back
    return None


def held_batches(iterator: Any) -> Sized | None:
    """Return the container of the batches that a loader's iterator has read and not given to the program.

    The loader removes each batch that it gives, and makes a new container for a new epoch. The iterator itself counts,
    too, but a reference to it keeps its processes alive, and with ``persistent_workers`` its number is reset.
    """
    if not getattr(iterator, "_num_workers", 0):
        return ()
    found = getattr(iterator, "_task_info", None)
    return found if isinstance(found, Sized) else None


def index_sampler(loader: Any) -> Any:
    """What gives a loader, or its iterator, the items that it asks a data set for, batch by batch."""
    return loader._index_sampler


def keeps_order(iterator: Any) -> bool:
    return bool(getattr(iterator, "_in_order", True))


def has_ended(iterator: Any) -> bool:
    """Whether the program has been told that the epoch is over; only torchdata's loaders know."""
    return bool(getattr(iterator, "_finished", False))


def with_samplers(loader: DataLoader[Any], **samplers: Any) -> Any:
    """Return a loader like ``loader`` with another ``sampler`` or ``batch_sampler``.

    It is a copy, and not a new loader of the same arguments: it has what this version of torch knows, and what the
    program has set since. Torch refuses to set the samplers of a loader that has been made.
    """
    made = copy(loader)
    vars(made).update(samplers, _iterator=None)
    return made
