"""All workers' values for all: tensors, and plain objects. Nothing is pickled.

A gather is an all-reduce of bytes, as a broadcast is: each worker contributes its bytes at a place of their own, and
zeros elsewhere. It uses the keys of broadcasts.
"""

from __future__ import annotations

from typing import Any

import torch

from kvstore import KVStore, UsageError
from workers import group
from workers.broadcast import complete, make_keys
from workers.common import bundle
from workers.common.gather import Gather
from workers.common.tensors import flat_bytes


def gather_object(value: Any, *, kvstore: KVStore | str | None = "auto") -> dict[int, Any]:
    """Return every worker's value, by rank. Every worker calls this, and all get all of them.

        found = workers.gather_object({"host": socket.gethostname(), "scores": scores})
        best = max(found, key=lambda rank: found[rank]["scores"].mean())

    Args:
        value: None, a bool, an integer of 64 bits, a float, a text, bytes, a tensor, or a list, tuple or dict of these;
            workers may have different ones. Nothing is pickled. Tensors arrive on the CPU.
        kvstore: a synchronous store without optimizer; ``auto`` for that of ``init``.

    Returns:
        A worker that is lost, in a job that goes on without it, or inside ``join``, has no entry.

    Raises:
        UsageError: the value is not plain; or before ``init``.
    """
    packed, tensors = bundle.pack(value)
    mine = torch.cat([torch.frombuffer(bytearray(packed), dtype=torch.uint8), *map(flat_bytes, tensors)])
    store = group.store_of(kvstore)
    make_keys(store)
    gather = Gather(store, "/gather/sizes", 2)
    sizes = {rank: (first - 1, size) for rank, (first, size) in gather.exchange([len(packed) + 1, len(mine)]).items()}
    data = torch.zeros(sum(size for _, size in sizes.values()), dtype=torch.uint8, device="cpu")
    starts, start = {}, 0
    for rank, (_, size) in sizes.items():
        starts[rank], start = start, start + size
    data[starts[store.rank] :][: len(mine)] = mine
    complete(store, data, starts[store.rank], starts[store.rank] + len(mine))
    if store.min_workers:  # who dies meanwhile has sent zeros; who comes to this has sent all
        there = gather.exchange([1])
        sizes = {rank: size for rank, size in sizes.items() if rank in there}
    return {
        rank: value if rank == store.rank else _unpacked(data[starts[rank] :][:size], first)
        for rank, (first, size) in sizes.items()
    }


def all_gather(tensor: torch.Tensor, *, kvstore: KVStore | str | None = "auto") -> dict[int, torch.Tensor]:
    """Return every worker's tensor, by rank. Every worker calls this, and all get all of them, to the bit.

        scores = torch.cat(list(workers.all_gather(scores).values()))  # of all workers, in the order of ranks

    Args:
        tensor: a dense tensor; shapes and dtypes may differ from worker to worker.
        kvstore: as for ``gather_object``.

    Returns:
        Tensors on the device of ``tensor``. A worker that is lost, or inside ``join``, has no entry.

    Raises:
        UsageError: it is not a dense tensor; or before ``init``.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"all_gather takes a tensor, not a {type(tensor).__name__}; gather_object takes other values")
    found = gather_object(tensor.detach(), kvstore=kvstore)
    return {rank: theirs.to(tensor.device) for rank, theirs in found.items()}


def _unpacked(data: torch.Tensor, first: int) -> Any:
    """Return the value whose bundle is ``data``: the ``first`` bytes, then those of the tensors."""
    packed, rest = data[:first].numpy().tobytes(), data[first:]
    tensors = []
    for form in bundle.forms(packed):
        made = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        nbytes = made.numel() * made.itemsize
        flat_bytes(made).copy_(rest[:nbytes])
        rest = rest[nbytes:]
        tensors.append(made)
    return bundle.unpack(packed, tensors)
