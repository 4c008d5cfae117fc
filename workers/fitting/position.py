"""Where a training is in its data: the epoch, and a position within it to continue from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler

from kvstore import UsageError


class Position:
    """The position in data, kept by the part that decides the order: the data itself, its sampler or batch sampler.

    Args:
        data: an iterable of batches, such as a ``DataLoader``. Parts with ``set_epoch`` are told each epoch. A part
            with ``state_dict`` and ``load_state_dict``, such as ``SplitSampler``, can continue within an epoch. If its
            ``state_dict`` takes a number, that is how many items of the epoch have been used. Otherwise it counts what
            it yields, so the loader must not read ahead.
    """

    def __init__(self, data: Any) -> None:
        batches = getattr(data, "batch_sampler", None)
        inner = getattr(data, "sampler", None) if batches is None else getattr(batches, "sampler", None)
        told = {id(part): part for part in (data, batches, inner, getattr(data, "sampler", None)) if part is not None}
        self._told = [part for part in told.values() if callable(getattr(part, "set_epoch", None))]
        self._stateful: Any = next((part for part in (data, batches, inner) if has_state(part)), None)
        self._counts = self._stateful is not None and not _takes_number(self._stateful)
        if self._counts and self._stateful is not data and getattr(data, "num_workers", 0) > 0:
            self._stateful = None
        self._length = 0  # of the epoch, as far as it is known
        # The unit of the state's count: without batches, samples are batches. A batch may have more labels than
        # samples, so samples are counted by the batch's size if it is known.
        self._in_samples = batches is not None and self._stateful is inner
        self._batch_size = batches.batch_size if type(batches) is BatchSampler else None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. If it is already under way, its rest comes next."""
        for part in self._told:
            part.set_epoch(epoch)
        if self._in_samples and self._batch_size is not None:
            self._length = len(self._stateful)

    def state(self, batches: int, samples: int) -> Any:
        """The position as a JSON value; None if the data has no state. The counts are 0 at the end of an epoch."""
        if self._stateful is None:
            return None
        if self._counts or batches == 0:
            return self._stateful.state_dict()
        if not self._in_samples:
            return self._stateful.state_dict(batches)
        return self._stateful.state_dict(
            samples if self._batch_size is None else min(batches * self._batch_size, self._length)
        )

    def load(self, state: Any) -> None:
        if state is None:
            return
        if self._stateful is None:
            raise UsageError(
                "the checkpoint has a position in the data, but this data's sampler has no load_state_dict; use "
                "SplitSampler"
            )
        self._stateful.load_state_dict(state)

    @property
    def continues(self) -> bool:
        return self._stateful is not None

    def require(self) -> None:
        if self._stateful is None:
            raise UsageError(
                "a checkpoint within an epoch needs data that can continue there: a DataLoader whose sampler or "
                "batch_sampler has state_dict and load_state_dict, such as workers.SplitSampler; with num_workers its "
                "state_dict must take the number of items that have been used"
            )

    def is_over(self, epoch: int) -> bool:
        at = getattr(self._stateful, "epoch", epoch)
        return isinstance(at, int) and at > epoch


def length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    what = f"{len(batch)} things" if isinstance(batch, tuple | list | Mapping) else type(batch).__name__
    raise UsageError(f"a batch must be a pair of inputs and labels, not {what}")


def has_state(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _takes_number(part: Any) -> bool:
    try:
        inspect.signature(part.state_dict).bind(0)
    except (TypeError, ValueError):
        return False
    return True
