"""``partition_dataset``: a worker's part of a torch data set, in batches; after Needle's ``ddp``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from kvstore import UsageError
from kvstore.values import as_dtype
from workers import group
from workers.samplers import SplitBatchSampler

SEED = 1234


def partition_dataset(
    dataset: Any,
    batch_size: int,
    device: torch.device | str | None = None,
    dtype: Any = None,
    *,
    seed: int = SEED,
    rank: int | None = None,
    size: int | None = None,
) -> tuple[DataLoader[Any], int]:
    """Return batches of this worker's part of ``dataset``, and the size of a batch.

    Over all workers, every sample comes once in an epoch. Each epoch has another order, which the seed determines. All
    workers have the same number of batches, so none waits for a step that the others never make. Where parts differ by
    one sample, the size of a batch near the end differs too. (Batches of one sample cannot be smaller: there a shorter
    part gives its first sample twice.) ``loader.batch_sampler.state_dict()`` is the position in the data; see
    ``SplitBatchSampler``.

    Args:
        dataset: a map-style data set of torch's: it has a length, and gives a sample for a number.
        batch_size: the samples in a batch of all workers together; each worker's batch has ``batch_size // size``.
        device: the device of the batches; None for the CPU.
        dtype: the dtype of floating-point values, as torch, numpy or its name; None leaves them as they are.
        seed: the seed of the division and of the order.
        rank: which part to return, from 0; None for this worker's rank in the group.
        size: how many parts there are; None for the size of the group.

    Returns:
        The loader, and the number of samples in one of its batches.

    Raises:
        UsageError: the data set is not map-style; there are fewer samples, or a smaller batch, than workers; or before
            ``init``.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(f"a {type(dataset).__name__} cannot be divided: pass a data set with __len__ and __getitem__")
    rank = group.rank() if rank is None else rank
    size = group.size() if size is None else size
    if batch_size // size < 1:
        raise UsageError(
            f"batch_size={batch_size} counts the samples of all {size} workers together: it must be at least {size}"
        )
    if len(dataset) < size:
        raise UsageError(f"{len(dataset)} samples cannot be divided between {size} workers: there must be one for each")
    collate = partial(_collate, device, None if dtype is None else as_dtype(dtype))
    batches = EqualBatches(len(dataset), batch_size // size, size, rank, seed=seed)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate), batch_size // size


class EqualBatches(SplitBatchSampler):
    """A ``SplitBatchSampler`` that keeps the last batch and has the same number of batches in every part."""

    def _count(self, epoch: int) -> int:
        longest = -(-self._length // self._parts)
        return -(-longest // self.batch_size)

    def _yielded(self, epoch: int, start: int) -> Iterator[list[int]]:
        samples = self._samples(epoch)
        sizes = batch_sizes(len(samples), self._count(epoch), self.batch_size)
        ends = list(accumulate(sizes))
        samples = [*samples, *samples[: ends[-1] - len(samples)]]
        return (samples[end - size : end] for end, size in list(zip(ends, sizes, strict=True))[start:])


def batch_sizes(samples: int, batches: int, batch_size: int) -> list[int]:
    """Return the sizes of ``batches`` batches: full ones, then one with the rest, which gets at least one sample.

    The sum is ``samples``; or one more, if ``batch_size`` is 1 and there are more batches than samples.
    """
    sizes = [batch_size] * (batches - 1) + [samples - batch_size * (batches - 1)]
    if sizes[-1] == 0:
        sizes[-1] = 1
        sizes[-2] = max(1, sizes[-2] - 1)
    return sizes


def _collate(device: torch.device | str | None, dtype: torch.dtype | None, samples: list[Any]) -> Any:
    return _placed(default_collate(samples), device, dtype)


def _placed(batch: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, dict):
        return {name: _placed(element, device, dtype) for name, element in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_placed(element, device, dtype) for element in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_placed(element, device, dtype) for element in batch)
    return batch
