"""Where a training is in its data: the epoch, and a position within it to continue from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore import UsageError

_SAMPLERS = ("batch_sampler", "sampler")


class Position:
    """The position in data, kept by the part that decides the order: the data itself, its sampler or batch sampler.

    Args:
        data: an iterable of batches, such as a ``DataLoader``. Parts with ``set_epoch`` are told each epoch. A part
            with ``state_dict`` and ``load_state_dict``, such as ``SplitSampler``, can continue within an epoch.
    """

    def __init__(self, data: Any) -> None:
        named = {"": data} | {name: getattr(data, name, None) for name in _SAMPLERS}
        inner = getattr(named["batch_sampler"], "sampler", None)
        parts = {id(part): part for part in (*named.values(), inner) if part is not None}
        self._told = [part for part in parts.values() if callable(getattr(part, "set_epoch", None))]
        stateful = {name: part for name, part in named.items() if _has_state(part)}
        self._stateful: Any
        name, self._stateful = next(iter(stateful.items()), ("", None))
        # The unit of the state's count; None if the data counts itself. Without batches, samples are batches.
        batched = named["batch_sampler"] is not None
        self._unit = None if name == "" else "samples" if name == "sampler" and batched else "batches"

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. If it is already under way, its rest comes next."""
        for part in self._told:
            part.set_epoch(epoch)

    def state(self, batches: int, samples: int) -> Any:
        """Return the position as a JSON value; None if the data has no state.

        Args:
            batches, samples: how many of the epoch have been used; 0 at the end of an epoch.
        """
        if self._stateful is None:
            return None
        if self._unit is None or batches == 0:
            return self._stateful.state_dict()
        return self._stateful.state_dict({"batches": batches, "samples": samples}[self._unit])

    def load(self, state: Any) -> None:
        """Go to the position that ``state`` returned.

        Raises:
            UsageError: the data has no state; or the data's own error if the state is not its own.
        """
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
        """Whether the data can continue within an epoch."""
        return self._stateful is not None

    def require(self) -> None:
        """Raise ``UsageError`` unless the data can continue within an epoch."""
        if self._stateful is None:
            raise UsageError(
                "a checkpoint within an epoch needs data that can continue there: a DataLoader whose sampler or "
                "batch_sampler has state_dict and load_state_dict, such as workers.SplitSampler"
            )

    def is_over(self, epoch: int) -> bool:
        """Whether nothing is left of ``epoch``."""
        at = getattr(self._stateful, "epoch", epoch)
        return isinstance(at, int) and at > epoch


def length(data: Any) -> int | None:
    """Return the number of batches in an epoch; None if unknown."""
    try:
        return len(data)
    except TypeError:
        return None


def pair(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch.

    Raises:
        UsageError: ``batch`` is not such a pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    what = f"{len(batch)} things" if isinstance(batch, tuple | list | Mapping) else type(batch).__name__
    raise UsageError(f"a batch must be a pair of inputs and labels, not {what}")


def _has_state(part: Any) -> bool:
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))
