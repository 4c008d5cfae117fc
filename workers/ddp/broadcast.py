"""One worker's values for all: weights before training, an optimizer's state, plain objects. Horovod's names.

A broadcast is an all-reduce to which everybody but one contributes zeros, of bytes, through a key of fixed size. So any
worker can be the root, every bit arrives, and the servers keep nothing of what was sent but the last piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from kvstore import AlreadyInitialized, KVStore, Mismatch, UsageError
from workers import group
from workers.common import bundle
from workers.common.chunks import ChunkRange, divide
from workers.common.gather import Gather, digest
from workers.common.values import describe

SMALL, LARGE = 1 << 14, 1 << 22  # bytes of a piece


def broadcast_parameters(params: Any, root_rank: int = 0, *, kvstore: KVStore | None = None) -> None:
    """Give every worker the values of ``root_rank``, in place. Every worker calls it.

    Args:
        params: a module, whose parameters and buffers are meant; a ``state_dict()``; or what ``parameters()`` or
            ``named_parameters()`` gives. Of any dtype and device.
        root_rank: whose values count.
        kvstore: a synchronous store without optimizer; None for that of ``init``.

    Raises:
        UsageError: something that is no dense tensor; no such rank; before ``init``.
        Mismatch: workers disagree on the root, or on names, shapes and dtypes; nothing has changed.
    """
    named = _named(params)
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise UsageError(f"{name!r} cannot be broadcast: it is {type(tensor).__name__}, not a dense tensor")
    relay = _Relay(kvstore, root_rank)
    relay.agree(describe(named))
    relay.send(list(named.values()))


def broadcast_object(value: Any, root_rank: int = 0, *, kvstore: KVStore | None = None) -> Any:
    """Return the value of ``root_rank``. Every worker calls it; what the others pass does not count.

    Args:
        value: plain: see ``workers/common/bundle.py``. Nothing is pickled. Tensors arrive on the CPU.
        root_rank: whose value counts.
        kvstore: as for ``broadcast_parameters``.

    Raises:
        UsageError: the root's value has something else in it; no such rank; before ``init``.
        Mismatch: workers disagree on the root.
    """
    relay = _Relay(kvstore, root_rank)
    packed, tensors = bundle.pack(value) if relay.root else (b"", [])
    relay.agree("object")
    packed = relay.send_bytes(packed)
    if not relay.root:
        tensors = [torch.zeros(form.shape, dtype=form.dtype) for form in bundle.forms(packed)]
    relay.send(tensors)
    return value if relay.root else bundle.unpack(packed, tensors)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, kvstore: KVStore | None = None
) -> None:
    """Give every worker's optimizer the state and the hyper-parameters of that of ``root_rank``.

    Works for any optimizer whose state is plain values and dense tensors, before its first step too. A state that is on
    the CPU there is so here; others come to their parameter's device.

    Args:
        optimizer: the same on all workers: the same groups of parameters of the same shapes.
        root_rank: whose state counts.
        kvstore: as for ``broadcast_parameters``.

    Raises:
        UsageError: the state has something else in it; no such rank; before ``init``.
        Mismatch: workers disagree on the root, or have other optimizers; nothing has changed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is one of torch.optim, not {type(optimizer).__name__}")
    relay = _Relay(kvstore, root_rank)
    params = [param for its in optimizer.param_groups for param in its["params"]]
    packed, tensors = _state(optimizer, params) if relay.root else (b"", [])
    numbers = [len(its["params"]) for its in optimizer.param_groups]
    relay.agree(
        f"{type(optimizer).__name__} {numbers} {describe({str(number): param for number, param in enumerate(params)})}"
    )
    packed = relay.send_bytes(packed)
    if relay.root:
        relay.send(tensors)
        return
    parts = bundle.unpack(packed, [])
    found = [[torch.zeros(form.shape, dtype=form.dtype) for form in bundle.forms(part)] for _, part in parts]
    relay.send([tensor for its in found for tensor in its])
    _load(optimizer, params, parts, found)


# ---- an optimizer's state as a list of owners and their bundles: None for the groups, a number for each parameter


def _state(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    number_of = {id(param): number for number, param in enumerate(params)}
    groups = [{name: value for name, value in its.items() if name != "params"} for its in optimizer.param_groups]
    owned = [(None, groups), *((number_of.get(id(owner), owner), value) for owner, value in optimizer.state.items())]
    parts: list[tuple[Any, bytes]] = []
    tensors: list[torch.Tensor] = []
    for owner, value in owned:
        packed, its = bundle.pack(dict(value) if isinstance(value, Mapping) else value)
        parts.append((owner, packed))
        tensors += its
    return bundle.pack(parts)[0], tensors


def _load(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],
    parts: Sequence[tuple[Any, bytes]],
    found: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Put what has come into ``optimizer``; ``load_state_dict`` would round states to their weights' dtype."""
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for (owner, part), tensors in zip(parts, found, strict=True):
        device = params[owner if isinstance(owner, int) else 0].device
        placed = [
            tensor if form.cpu else tensor.to(device) for form, tensor in zip(bundle.forms(part), tensors, strict=True)
        ]
        value = bundle.unpack(part, placed)
        if owner is None:
            groups = value
        else:
            state[params[owner] if isinstance(owner, int) else owner] = value
    optimizer.state.clear()
    optimizer.state.update(state)
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        mine.update(theirs)


# ---- how it travels


class _Relay:
    """Sends one worker's bytes to all.

    Args:
        kvstore: a synchronous store without optimizer; None for the group's.
        root: whose.

    Raises:
        UsageError: no such rank; before ``init``.
    """

    def __init__(self, kvstore: KVStore | None, root: int) -> None:
        self._store = group.store() if kvstore is None else kvstore
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._store.num_workers:
            raise UsageError(f"root_rank={root!r} is none of the {self._store.num_workers} workers, counted from 0")
        self._root_rank = root
        self.root = root == self._store.rank
        self._gather = Gather(self._store, "/broadcast/marks", 2)
        with suppress(AlreadyInitialized):  # by the broadcast before this one
            sizes = (SMALL, LARGE)
            self._store.init([_key(size) for size in sizes], [torch.zeros(size, dtype=torch.uint8) for size in sizes])

    def agree(self, what: str) -> None:
        """Require that all workers broadcast the same, ``what``, from the same root."""
        rows = self._gather.exchange([self._root_rank + 1, digest(what)])
        for rank, (root, its) in enumerate(rows):
            if root != self._root_rank + 1:
                raise Mismatch(f"worker {rank} broadcasts from root_rank={root - 1}, this one from {self._root_rank}")
            if its != digest(what):
                raise Mismatch(
                    f"worker {rank} broadcasts something else: the names, shapes and dtypes must be the same on all "
                    "workers, in the same order"
                )

    def send_bytes(self, data: bytes) -> bytes:
        """Return the root's ``data``, of any length."""
        _, length = self._gather.exchange([1, len(data)])[self._root_rank]
        mine = np.frombuffer(bytearray(data) if self.root else bytearray(length), dtype=np.uint8)
        tensor = torch.from_numpy(mine)
        self.send([tensor])
        return tensor.numpy().tobytes()

    @torch.no_grad()
    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the root's ``tensors`` into everybody's."""
        if self._store.num_workers == 1:
            return
        flat = {str(number): _bytes_of(tensor) for number, tensor in enumerate(tensors)}
        total = sum(its.numel() for its in flat.values())
        size = SMALL if total <= SMALL else LARGE
        piece = self._store.empty(size, torch.uint8)
        for chunk in divide(flat, size):
            piece.zero_()
            if self.root:
                _copy(flat, chunk, piece, out=True)
            self._store.pushpull(_key(size), piece)
            if not self.root:
                _copy(flat, chunk, piece, out=False)
        if not self.root:
            for number, tensor in enumerate(tensors):
                its = flat[str(number)].view(tensor.dtype).view(tensor.shape)
                if its.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(its)


def _key(size: int) -> str:
    return f"/broadcast/{size}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, flat, on the CPU; over its memory where that can be."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _copy(flat: Mapping[str, torch.Tensor], chunk: Sequence[ChunkRange], piece: torch.Tensor, *, out: bool) -> None:
    """Copy the parts of ``chunk`` into ``piece``, back to back; or, not ``out``, from there."""
    start = 0
    for part in chunk:
        its = flat[part.name][part.start : part.stop]
        there = piece[start : start + len(its)]
        (there if out else its).copy_(its if out else there)
        start += len(its)


def _named(params: Any) -> dict[str, Any]:
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters()) | dict(params.named_buffers())
    if isinstance(params, Mapping):
        return {str(name): value for name, value in params.items()}
    items = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    pairs = [item if isinstance(item, tuple) and len(item) == 2 else (n, item) for n, item in enumerate(items)]
    return {str(name): value for name, value in pairs}
