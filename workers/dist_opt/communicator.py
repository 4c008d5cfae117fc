"""What SINGA's DistOpt gives beside updates: who the workers are, and sums of anything over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import kvstore as kv
from kvstore import KVStore, UsageError
from kvstore.job.config import Config
from kvstore.values import as_output
from workers import group
from workers.dist_opt.channel import Channel


class Communicator:
    """Sums over workers, which all call the same methods in the same order.

    Args:
        kvstore: the type of store to make, or a synchronous store without optimizer, for this alone, to use for all
            that is not compressed. None for stores of the process's group, which is joined if need be.
    """

    def __init__(self, kvstore: KVStore | str | None) -> None:
        if kvstore is None and not group.is_initialized():
            group.init()
        self._kind = kvstore if kvstore is None or isinstance(kvstore, str) else kvstore.type
        self._made: list[KVStore] = []
        self._store = kvstore if isinstance(kvstore, KVStore) else self._new_store()
        self._plain = Channel(self._store)
        self._compressed: dict[str, Channel] = {}

    def all_reduce(self, tensor: Any) -> None:
        """Replace ``tensor`` by its sum over workers; returns when it is there.

        Args:
            tensor: a tensor on any device, a numpy array or anything with DLPack; of the same shape and dtype on all
                workers.
        """
        self.fused_all_reduce([tensor])

    def fused_all_reduce(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce`` of several tensors, in one message.

        Args:
            tensor: a list of them.
            send: False only gets ready to send them in SINGA; here it does nothing.
        """
        if send:
            self._plain.sum([keyed([as_output(out) for out in tensor])])

    def all_reduce_half(self, tensor: Any) -> None:
        """``all_reduce`` of floats that travel as float16: what is beyond its range, 65504, becomes infinite."""
        self.fused_all_reduce_half([tensor])

    def fused_all_reduce_half(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce_half`` of several tensors, in one message; see ``fused_all_reduce``."""
        if send:
            outs = [as_output(out) for out in tensor]
            halves = [out.half() for out in outs]
            self._plain.sum([keyed(halves)])
            for out, half in zip(outs, halves, strict=True):
                out.copy_(half)

    def wait(self) -> None:
        """Do nothing: every method here returns when it is done. SINGA's scripts call it after ``all_reduce``."""

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._store.num_workers

    @property
    def rank_in_global(self) -> int:
        """This worker's number, from 0."""
        return self._store.rank

    @property
    def rank_in_local(self) -> int:
        """This worker's number among those of its host, from 0.

        Raises:
            UsageError: whoever has started this process has not said.
        """
        if self.world_size == 1:
            return 0
        number = Config.from_env().local_rank
        if number < 0:
            raise UsageError(
                "which worker of its host this is has not been said: KVSTORE_LOCAL_RANK is not set; launch.py sets it"
            )
        return number

    # SINGA's later names for these.
    global_rank = rank_in_global
    local_rank = rank_in_local

    def close(self) -> None:
        """End the use of the stores that were made here; not needed at the end of a program."""
        for store in self._made:
            store.close()

    def _channel(self, name: str) -> Channel:
        """What ``name`` is compressed through, with a store of its own."""
        if name not in self._compressed:
            self._compressed[name] = Channel(self._new_store())
        return self._compressed[name]

    def _new_store(self) -> KVStore:
        self._made.append(group.new_store() if self._kind is None else kv.create(self._kind))
        return self._made[-1]


def keyed(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by keys that say what they are and, of those that are alike, which."""
    counts: Counter[str] = Counter()
    found = {}
    for tensor in tensors:
        kind = f"{tensor.dtype}{list(tensor.shape)}"
        found[f"{kind}/{counts[kind]}"] = tensor
        counts[kind] += 1
    return found
