"""Broadcasts of one worker's values: weights before training, an optimizer's state, plain objects. Horovod's names.

A broadcast is an all-reduce of bytes to which all workers but the root contribute zeros, through keys of fixed size. So
any worker can be the root, every bit arrives, and the servers keep only the last piece.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

from kvstore import AlreadyInitialized, KVStore, Mismatch, UsageError
from workers import group
from workers.common import bundle
from workers.common.checks import require_optimizer
from workers.common.chunks import ChunkRange, divide
from workers.common.gather import Gather, digest
from workers.common.tensors import flat_bytes, has_parts, is_dense, overwrite, put_together, take_apart
from workers.common.values import describe

log = logging.getLogger(__name__)

# Keys of two fixed sizes, because keys stay on the servers: a key for each broadcast would fill them.
SMALL, LARGE = 1 << 14, 1 << 22  # bytes in a piece


def broadcast_parameters(params: Any, root_rank: int = 0, *, kvstore: KVStore | str | None = "auto") -> None:
    """Overwrite every worker's values with the values of ``root_rank``, to the bit. Every worker calls this.

    Args:
        params: a module, for all its parameters and buffers, frozen and non-persistent ones too; a ``state_dict()``; or
            the result of ``parameters()`` or ``named_parameters()``. Any dtype and device; dense, sparse or quantized.
        root_rank: the worker whose values are sent.
        kvstore: a synchronous store without optimizer; ``auto`` for that of ``init``.

    A worker that was started again, and has not come back yet, keeps its own values if they are more than 16 KiB. What
    its ``DistributedOptimizer`` or ``Trainer`` has of them, it takes over when it comes back.

    Raises:
        UsageError: a value is no tensor with values of its own; there is no such rank; or before ``init``.
        Mismatch: workers disagree on the root, or on names, shapes and dtypes. Nothing has changed.
    """
    named = _named(params)
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor) or not has_parts(tensor):
            raise UsageError(
                f"{name!r} cannot be broadcast: it is {type(tensor).__name__}, not a dense, sparse or quantized tensor"
            )
    relay = Relay(kvstore, root_rank)
    relay.agree(describe(named))
    relay.send([tensor for tensor in named.values() if is_dense(tensor)], optional=True)
    odd = [tensor for tensor in named.values() if not is_dense(tensor)]
    if odd:  # how many elements each of them stores may differ from worker to worker
        apart = bundle.pack([take_apart(tensor) for tensor in odd]) if relay.root else None
        theirs = relay.send_packed(apart)
        for tensor, (form, parts) in () if relay.root else zip(odd, theirs, strict=True):
            overwrite(tensor, put_together(form, parts))


def broadcast_object(value: Any, root_rank: int = 0, *, kvstore: KVStore | str | None = "auto") -> Any:
    """Return the value of ``root_rank``. Every worker calls this; the values of the others are ignored.

    Args:
        value: None, a bool, an integer of 64 bits, a float, a text, bytes, a tensor, or a list, tuple or dict of these.
            Nothing is pickled. Tensors arrive on the CPU.
        root_rank: the worker whose value is sent.
        kvstore: as for ``broadcast_parameters``.

    Raises:
        UsageError: the root's value is not plain; there is no such rank; or before ``init``.
        Mismatch: workers disagree on the root.
    """
    relay = Relay(kvstore, root_rank)
    packed = bundle.pack(value) if relay.root else None
    relay.agree("an object")
    theirs = relay.send_packed(packed)
    return value if relay.root else theirs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, kvstore: KVStore | str | None = "auto"
) -> None:
    """Give every worker's optimizer the state and the hyper-parameters of the optimizer of ``root_rank``.

    Works for any optimizer whose state is plain values and dense tensors, also before its first step. State on the CPU
    of the root stays on the CPU; other state goes to its parameter's device.

    Args:
        optimizer: an optimizer of the same class on all workers, with the same groups of parameters of the same shapes.
        root_rank: the worker whose state is sent.
        kvstore: as for ``broadcast_parameters``.

    Raises:
        UsageError: the state has other values in it; there is no such rank; or before ``init``.
        Mismatch: workers disagree on the root, or have different optimizers. Nothing has changed.
    """
    require_optimizer(optimizer)
    _broadcast_state(optimizer, root_rank, kvstore, plain_only=False)


def share_optimizer(optimizer: torch.optim.Optimizer, root_rank: int, kvstore: KVStore) -> None:
    """``broadcast_optimizer_state``, where each worker keeps its own of what cannot be sent of the groups."""
    _broadcast_state(optimizer, root_rank, kvstore, plain_only=True)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what ``share_optimizer`` would send, as a state of texts and bytes that can be attached to a store."""
    packed, tensors = _state(optimizer, _params(optimizer), plain_only=True)
    return {"packed": torch.frombuffer(bytearray(packed), dtype=torch.uint8), "tensors": list(map(flat_bytes, tensors))}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over what ``optimizer_state`` has returned on another worker."""
    parts, tensors = bundle.unpack(state["packed"].numpy().tobytes(), []), iter(state["tensors"])
    received = [
        [next(tensors).clone().view(form.dtype).view(form.shape) for form in bundle.forms(part)] for _, part in parts
    ]
    _load(optimizer, _params(optimizer), parts, received)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for param_group in optimizer.param_groups for param in param_group["params"]]


def _broadcast_state(
    optimizer: torch.optim.Optimizer, root_rank: int, kvstore: KVStore | str | None, *, plain_only: bool
) -> None:
    relay = Relay(kvstore, root_rank)
    params = _params(optimizer)
    packed, tensors = _state(optimizer, params, plain_only) if relay.root else (b"", [])
    numbers = [len(param_group["params"]) for param_group in optimizer.param_groups]
    described = describe({f"parameter {number}": param for number, param in enumerate(params)})
    relay.agree(f"{type(optimizer).__name__} with groups of {numbers} parameters\n{described}")
    packed = relay.send_bytes(packed)
    if relay.root:
        relay.send(tensors)
        return
    parts = bundle.unpack(packed, [])
    received = [
        [torch.zeros(form.shape, dtype=form.dtype, device="cpu") for form in bundle.forms(part)] for _, part in parts
    ]
    relay.send([tensor for part_tensors in received for tensor in part_tensors])
    _load(optimizer, params, parts, received)


# ---- an optimizer's state as pairs of owner and bundle; the owner is None for the groups, a number for a parameter


def _state(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], plain_only: bool
) -> tuple[bytes, list[torch.Tensor]]:
    number_of = {id(param): number for number, param in enumerate(params)}
    groups = [
        {
            name: value
            for name, value in param_group.items()
            if name != "params" and not (plain_only and not bundle.is_plain(value))
        }
        for param_group in optimizer.param_groups
    ]
    owned = [(None, groups), *((number_of.get(id(owner), owner), value) for owner, value in optimizer.state.items())]
    parts: list[tuple[Any, bytes]] = []
    tensors: list[torch.Tensor] = []
    for owner, value in owned:
        packed, packed_tensors = bundle.pack(dict(value) if isinstance(value, Mapping) else value)
        parts.append((owner, packed))
        tensors += packed_tensors
    return bundle.pack(parts)[0], tensors


@torch.no_grad()
def _load(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],
    parts: Sequence[tuple[Any, bytes]],
    received: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Load the state into ``optimizer``. ``load_state_dict`` would round it to the dtype of the weights."""
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for (owner, part), tensors in zip(parts, received, strict=True):
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
        for name, value in theirs.items():
            own = mine.get(name)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                own.copy_(value)  # schedulers, and the program, fill a rate that is a tensor in place
            else:
                mine[name] = value


# ---- how it travels


def make_keys(store: KVStore) -> None:
    """Have the keys of pieces in ``store``."""
    with suppress(AlreadyInitialized):  # an earlier broadcast has made them
        sizes = (SMALL, LARGE)
        store.init(
            [_key(size) for size in sizes], [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
        )


def complete(store: KVStore, data: torch.Tensor, start: int, stop: int) -> None:
    """Complete flat bytes, of which this worker has those from ``start`` to ``stop``; all workers together have all."""
    if store.num_workers == 1:
        return
    size = SMALL if len(data) <= SMALL else LARGE
    piece = store.empty(size, torch.uint8)
    for first in range(0, len(data), size):
        part = data[first : first + size]
        begin, end = max(start - first, 0), min(stop - first, size)
        piece.zero_()
        if begin < end:
            piece[begin:end].copy_(part[begin:end])
        store.pushpull(_key(size), piece)
        part.copy_(piece[: len(part)])


class Relay:
    """Sends one worker's bytes to all."""

    def __init__(self, kvstore: KVStore | str | None, root: int) -> None:
        self._store = group.store_of(kvstore)
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._store.num_workers:
            raise UsageError(f"root_rank={root!r} must be the rank of a worker, 0 to {self._store.num_workers - 1}")
        self._root_rank = root
        self.root = root == self._store.rank
        self._gather = Gather(self._store, "/broadcast/marks", 2)
        make_keys(self._store)

    def agree(self, what: str) -> None:
        """Require that all workers broadcast the same from the same root. ``what``: a line for each tensor."""
        rows = self._gather.exchange([self._root_rank + 1, digest(what)])
        self._require_root(rows)
        for rank, (root, _) in rows.items():
            if root != self._root_rank + 1:
                raise Mismatch(f"worker {rank} broadcasts from root_rank={root - 1}, this one from {self._root_rank}")
        if len({theirs for _, theirs in rows.values()}) == 1:
            return
        # All workers have the same rows, so all of them come here, and none waits for another.
        mine, roots = what.split("\n"), self.send_bytes(what.encode()).decode().split("\n")
        pairs = list(zip_longest(roots, mine))
        first = next((place for place, (theirs, own) in enumerate(pairs) if theirs != own), -1)
        places = {rank: place for rank, (_, place) in self._gather.exchange([1, first + 1]).items()}
        rank = next(rank for rank, place in places.items() if place)
        theirs = dict(enumerate(roots)).get(places[rank] - 1) or "nothing more"
        own = f", where it has {pairs[first][1] or 'nothing more'}" if rank == self._store.rank else ""
        raise Mismatch(
            f"worker {rank} broadcasts something else than worker {self._root_rank}{own}: worker {self._root_rank} has "
            f"{theirs} there. Names, shapes, dtypes and their order must be the same on all workers"
        )

    def _require_root(self, present: Container[int]) -> None:
        """Raise ``UsageError`` on all workers if the root is lost, or inside ``join``: its zeros would be sent."""
        if self._root_rank not in present:
            raise UsageError(
                f"worker {self._root_rank}, whose values all are to have, is lost or inside join(); pass another "
                "root_rank"
            )

    def send_bytes(self, data: bytes) -> bytes:
        rows = self._gather.exchange([1, len(data)])
        self._require_root(rows)
        _, length = rows[self._root_rank]
        mine = np.frombuffer(bytearray(data) if self.root else bytearray(length), dtype=np.uint8)
        tensor = torch.from_numpy(mine)
        self.send([tensor])
        return tensor.numpy().tobytes()

    def send_packed(self, bundled: tuple[bytes, list[torch.Tensor]] | None) -> Any:
        """Return the value that the root has packed as ``bundled``; the others pass None."""
        packed, tensors = bundled or (b"", [])
        packed = self.send_bytes(packed)
        if bundled is None:
            tensors = [torch.zeros(form.shape, dtype=form.dtype, device="cpu") for form in bundle.forms(packed)]
        self.send(tensors)
        return bundle.unpack(packed, tensors)

    @torch.no_grad()
    def send(self, tensors: Sequence[torch.Tensor], *, optional: bool = False) -> None:
        if self._store.num_workers == 1:
            return
        flat = {str(number): flat_bytes(tensor) for number, tensor in enumerate(tensors)}
        total = sum(data.numel() for data in flat.values())
        size = SMALL if total <= SMALL else LARGE
        piece = self._store.empty(size, torch.uint8)
        # Servers keep small sums for workers that are started again.
        kept = optional and size == LARGE and self._store.newcomer
        for chunk in divide(flat, size) if not kept else ():
            # Integers of one byte: the sum of the root's and zeros is exact, and never compressed.
            piece.zero_()
            if self.root:
                _copy(flat, chunk, piece, out=True)
            self._store.pushpull(_key(size), piece)
            if not self.root:
                _copy(flat, chunk, piece, out=False)
        if self._store.min_workers:  # a root that dies meanwhile has sent zeros; one that comes to this has sent all
            self._require_root(self._gather.exchange([1]))
        if kept:
            log.info("this worker was started again: it keeps its own values in a broadcast until it comes back")
        elif not self.root:
            for number, tensor in enumerate(tensors):
                value = flat[str(number)].view(tensor.dtype).view(tensor.shape)
                if value.data_ptr() != tensor.data_ptr():
                    overwrite(tensor, value)


def _key(size: int) -> str:
    return f"/broadcast/{size}"


def _copy(flat: Mapping[str, torch.Tensor], chunk: Sequence[ChunkRange], piece: torch.Tensor, *, out: bool) -> None:
    """Copy the ranges of ``chunk`` into ``piece``, back to back; if not ``out``, from ``piece`` back."""
    start = 0
    for part in chunk:
        elements = flat[part.name][part.start : part.stop]
        slot = piece[start : start + len(elements)]
        (slot if out else elements).copy_(elements if out else slot)
        start += len(elements)


def _named(params: Any) -> dict[str, Any]:
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters()) | dict(params.named_buffers())
    if isinstance(params, Mapping):
        return {str(name): value for name, value in params.items()}
    items = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    pairs = [item if isinstance(item, tuple) and len(item) == 2 else (n, item) for n, item in enumerate(items)]
    return {str(name): value for name, value in pairs}
