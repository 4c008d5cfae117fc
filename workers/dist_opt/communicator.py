"""What SINGA's ``DistOpt`` offers beside updates: ranks, and sums over workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore import KVStore, Unsupported, UsageError
from kvstore.codecs import Compressor, decode, parse
from kvstore.job.config import Config
from kvstore.store.maker import UNNAMED
from kvstore.values import as_output
from workers import group
from workers.common.gather import Gather
from workers.common.pushed import settle
from workers.common.stores import AUTO

# The sums on the way back are mostly zeros: everything else is sent, exactly.
NOT_ZERO: Mapping[str, object] = {"type": "threshold", "threshold": 2.0**-126}


class Channel:
    """An all-reduce by key, either plain or compressed.

    A store in one process sends nothing, and so compresses nothing. There, values lose here what compression would take
    from them, so that a script gives the same results alone as in a job of one worker.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._known: set[str] = set()
        self._alone: list[Compressor] = []  # alone: a compressor for the way up, and one for the way back
        self._options: Mapping[str, object] | None = None

    def compress(self, options: Mapping[str, object], keep: bool = True) -> None:
        """Compress from now on. With ``keep``, the residuals of earlier encodings stay if the options are the same."""
        if keep and options == self._options:
            return
        self._options = options
        try:
            self.store.set_gradient_compression(None)
            self.store.set_gradient_compression(options)
        except Unsupported:
            upward = parse(options)
            self._alone = [Compressor(way) for way in (upward, upward.pull) if way is not None]

    def sum(self, messages: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace values, one dict by key for each message, by their sums over workers. All workers call this alike."""
        for values in messages:
            self.prepare(values)
        for values in messages:
            for key, value in values.items():
                if value.is_floating_point():
                    self._lose(key, value)
        tickets = [self.store.pushpull(list(values), list(values.values()), wait=False) for values in messages]
        settle(tickets)

    def prepare(self, values: Mapping[str, torch.Tensor]) -> None:
        new = [key for key in values if key not in self._known]
        if new:
            self.store.init(new, [torch.zeros_like(values[key]) for key in new])
            self._known.update(new)

    def broadcast(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace values by those of rank 0; their keys must be new."""
        self.store.broadcast(list(values), list(values.values()), list(values.values()))
        self._known.update(values)

    def _lose(self, key: str, value: torch.Tensor) -> None:
        for compressor in self._alone:
            encoded = compressor.encode(key, value)
            kept = decode(compressor.compression, encoded.payload(0, encoded.size), encoded.size)
            value.copy_(kept.view(value.shape))


def fuse(sizes: Sequence[int], threshold: int) -> list[list[int]]:
    """Return the positions of the values that share a message: SINGA's fusion.

    A value larger than the threshold gets a message of its own. Smaller ones gather, in order, until they are together
    larger than the threshold.
    """
    groups: list[list[int]] = []
    held: list[int] = []
    for position, size in enumerate(sizes):
        if size > threshold:
            groups.append([position])
            continue
        held.append(position)
        if sum(sizes[i] for i in held) > threshold:
            groups.append(held)
            held = []
    return [*groups, held] if held else groups


class Communicator:
    """Sums over workers. All workers call the same methods in the same order.

    Args:
        kvstore: the type of the stores to make, or a synchronous store without optimizer, for this alone, which is used
            for everything that is not compressed. ``auto``: stores of the process's group, which is joined if needed.
    """

    def __init__(self, kvstore: KVStore | str | None) -> None:
        self._type = AUTO if kvstore is None else kvstore if isinstance(kvstore, str) else kvstore.type
        if self._type == AUTO and not group.is_initialized():
            group.init()
        self._made: list[KVStore] = []
        self._store = kvstore if isinstance(kvstore, KVStore) else self._new_store()
        self._plain = Channel(self._store)
        self._compressed: dict[str, Channel] = {}

    def all_reduce(self, tensor: Any) -> None:
        """Replace ``tensor`` by its sum over workers, and return when that is done.

        Args:
            tensor: a tensor on any device, a numpy array, or an array with DLPack; of the same shape and dtype on all
                workers.
        """
        self.fused_all_reduce([tensor])

    def fused_all_reduce(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce`` of several tensors, in one message.

        Args:
            tensor: the list of tensors.
            send: False does nothing. In SINGA it prepares a later call.
        """
        if send:
            self._plain.sum([keyed([as_output(out) for out in tensor])])

    def all_reduce_half(self, tensor: Any) -> None:
        """``all_reduce`` of floats that are sent as float16.

        Args:
            tensor: as for ``all_reduce``. Values and sums beyond float16's range, 65504, become infinite.
        """
        self.fused_all_reduce_half([tensor])

    def fused_all_reduce_half(self, tensor: Sequence[Any], send: bool = True) -> None:
        """``all_reduce_half`` of several tensors, in one message.

        Args:
            tensor: the list of tensors.
            send: False does nothing, as for ``fused_all_reduce``.
        """
        if send:
            outs = [as_output(out) for out in tensor]
            halves = [out.half() for out in outs]
            self._plain.sum([keyed(halves)])
            for out, half in zip(outs, halves, strict=True):
                out.copy_(half)

    def wait(self) -> None:
        """Do nothing: every method returns when it is done. SINGA's scripts call this after ``all_reduce``."""

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._store.num_workers

    @property
    def rank_in_global(self) -> int:
        """This worker's rank, from 0."""
        return self._store.rank

    @property
    def rank_in_local(self) -> int:
        """This worker's rank among the workers of its host, from 0.

        Raises:
            UsageError: the launcher has not set it.
        """
        if self.world_size == 1:
            return 0
        number = Config.from_env().local_rank
        if number < 0:
            raise UsageError(
                "this worker's rank on its host is unknown: KVSTORE_LOCAL_RANK is not set; launch.py sets it"
            )
        return number

    # SINGA's later names for these.
    global_rank = rank_in_global
    local_rank = rank_in_local

    def close(self) -> None:
        """Close the stores that were made here. Not needed at the end of a program."""
        for store in self._made:
            store.close()

    def _channel(self, name: str) -> Channel:
        """Return the compressed channel ``name``, which has its own store."""
        if name not in self._compressed:
            # Through the store that all have: a new one would wait in vain for a worker that has joined before.
            Gather(self._store, f"/{name}", 1).exchange([1])
            self._compressed[name] = Channel(self._new_store())
            self._opened(self._compressed[name].store)
        return self._compressed[name]

    def _opened(self, store: KVStore) -> None:
        """Note that there is another ``store``."""

    def _new_store(self) -> KVStore:
        self._made.append(group.store_for(self._type, "DistOpt", UNNAMED))
        return self._made[-1]


def keyed(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by keys made of dtype, shape, and a number among the tensors of the same dtype and shape."""
    counts: Counter[str] = Counter()
    by_key = {}
    for tensor in tensors:
        kind = f"{tensor.dtype}{list(tensor.shape)}"
        by_key[f"{kind}/{counts[kind]}"] = tensor
        counts[kind] += 1
    return by_key
