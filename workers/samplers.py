"""Torch samplers that split an epoch over workers: which samples are this worker's, and in which order.

An epoch's order depends only on the seed and the epoch. So all workers agree on it without communication, and (epoch,
number of samples taken) is enough to resume a run to the bit.

    sampler = SplitSampler(len(dataset), store.num_workers, store.rank)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

from kvstore import Mismatch, UnknownName, UsageError
from workers.common.checks import at_least

T_co = TypeVar("T_co", covariant=True)

LAST_BATCH = ("keep", "discard", "rollover")


class _Split(Sampler[T_co]):
    """One part of a data set, epoch by epoch, and the position in it. Subclasses define what an epoch yields."""

    def __init__(
        self,
        length: int | Sized,
        num_parts: int,
        part_index: int,
        even_size: bool,
        shuffle: bool,
        seed: int,
    ) -> None:
        self._length = at_least("length", len(length) if isinstance(length, Sized) else length, 0)
        self._parts = at_least("num_parts", num_parts, 1)
        self._index = at_least("part_index", part_index, 0)
        if self._index >= self._parts:
            raise UsageError(f"part_index={part_index} must be less than num_parts={num_parts}")
        self._even, self._shuffle, self._seed = bool(even_size), bool(shuffle), at_least("seed", seed, 0, 2**64 - 1)
        if self._even and 0 < self._length < self._parts:
            raise UsageError(
                f"{length} samples cannot be split evenly into {num_parts} parts: there must be one for each"
            )
        self._epoch = self._taken = 0
        self._fresh = True  # whether the next iteration begins at this position

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if the current one has ended; the first is 0."""
        return self._epoch if self._fresh or self._taken < self._count(self._epoch) else self._epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``. If it is already under way, nothing changes, so a resumed loop continues.

        Without this call, an epoch that was iterated to its end is followed by the next one, and one that was broken
        off begins again.
        """
        at_least("epoch", epoch, 0)
        if epoch != self.epoch:
            self._epoch, self._taken, self._fresh = epoch, 0, True

    def __iter__(self) -> Iterator[T_co]:
        if not self._fresh:
            self._epoch, self._taken = self.epoch, 0
        self._fresh = False
        return self._iterate(self._epoch, self._taken)

    def __len__(self) -> int:
        """The number of items in the whole epoch that is under way, or is next."""
        return self._count(self.epoch)

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the position, and the settings that it depends on, as JSON values.

        Args:
            taken: how many items of this epoch have been used; None for as many as were yielded. A ``DataLoader`` with
                ``num_workers`` takes more items than it has handed out, so pass the number there.

        Raises:
            UsageError: ``taken`` is more than the epoch has.
        """
        epoch = self._epoch
        total = self._count(epoch)
        if taken is None:
            taken = self._taken
        elif at_least("taken", taken, 0) > total:
            raise UsageError(f"taken={taken} must be at most {total}, the length of epoch {epoch}")
        if taken == total and not self._fresh:
            epoch, taken = epoch + 1, 0
        return {**self._setting(), "epoch": epoch, "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` returned ``state``, in this part or another part of the same split.

        If all parts were equally far, the state of one is enough for all.

        Raises:
            Mismatch: the state is of another data set, split or seed.
        """
        mine = self._setting()
        theirs = {name: state.get(name) for name in mine}
        if theirs != mine:
            words = ", ".join(
                f"{name}={theirs[name]!r} there, {mine[name]!r} here" for name in mine if theirs[name] != mine[name]
            )
            raise Mismatch(f"this state is of another sampler: {words}; make the sampler as in the run that saved it")
        epoch, taken = at_least("epoch", state.get("epoch"), 0), at_least("taken", state.get("taken"), 0)
        self._epoch, self._taken, self._fresh = epoch, min(taken, self._count(epoch)), True

    def _iterate(self, epoch: int, start: int) -> Iterator[T_co]:
        for number, item in enumerate(self._yielded(epoch, start), start + 1):
            self._taken = number  # before the yield: a loop that stops after the last item has used them all
            yield item

    @property
    def _size(self) -> int:
        """The number of samples in an epoch of this part."""
        share, rest = divmod(self._length, self._parts)
        return share + (rest > 0 if self._even else self._index < rest)

    def _samples(self, epoch: int) -> Sequence[int]:
        """Return the samples of ``epoch``, in order."""
        order = np.arange(self._length)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        share, rest = divmod(self._length, self._parts)
        start = self._index * share + min(self._index, rest)
        mine = np.arange(start, start + self._size) % max(1, self._length)  # an even size may wrap around
        return order[mine].tolist()  # type: ignore[no-any-return]

    def _setting(self) -> dict[str, Any]:
        """The settings that the order depends on, without the part."""
        return {
            "length": self._length,
            "num_parts": self._parts,
            "even_size": self._even,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _count(self, epoch: int) -> int:
        """Return the number of items in ``epoch``."""
        raise NotImplementedError

    def _yielded(self, epoch: int, start: int) -> Iterator[T_co]:
        """Return the items of ``epoch`` from ``start`` on."""
        raise NotImplementedError


class SplitSampler(_Split[int]):
    """The samples of one of ``num_parts`` workers, as in GluonNLP and d2l; for ``DataLoader(..., sampler=...)``.

    In every epoch each sample is in exactly one part. If parts cannot be equal, the first ones have one sample more, so
    workers may have different numbers of batches: see ``KVStore.join``. The whole data set is shuffled and then split.
    (d2l shuffles within fixed parts: with images sorted by class, each worker then has classes of its own.)

    Args:
        length: the number of samples, or an object with that length, such as the data set.
        num_parts: the number of workers.
        part_index: this worker's rank.
        even_size: make all parts equal; a part that lacks a sample also takes one of its neighbor's.
        shuffle: use another order in each epoch; False gives each part its range of the data set, in order.
        seed: the seed of the order, the same in all parts.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        length: int | Sized,
        num_parts: int = 1,
        part_index: int = 0,
        even_size: bool = False,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(length, num_parts, part_index, even_size, shuffle, seed)

    def _count(self, epoch: int) -> int:
        return self._size

    def _yielded(self, epoch: int, start: int) -> Iterator[int]:
        return iter(self._samples(epoch)[start:])


class SplitBatchSampler(_Split[list[int]]):
    """Batches of a ``SplitSampler``'s samples, with Gluon's ``last_batch``; for ``DataLoader(..., batch_sampler=...)``.

    Args:
        length: the number of samples, or an object with that length, such as the data set.
        batch_size: the samples in a batch.
        num_parts: the number of workers.
        part_index: this worker's rank.
        last_batch: what happens to samples that do not fill a batch at an epoch's end. ``keep`` makes a smaller batch
            of them, ``discard`` leaves them out, ``rollover`` begins the next epoch with them. What rolls over into an
            epoch depends only on its number, as if all earlier epochs had been iterated.
        even_size: make all parts equal; see ``SplitSampler``.
        shuffle: use another order in each epoch; see ``SplitSampler``.
        seed: the seed of the order, the same in all parts.

    Raises:
        UsageError: a number is out of range.
        UnknownName: ``last_batch`` is none of these.
    """

    def __init__(
        self,
        length: int | Sized,
        batch_size: int,
        num_parts: int = 1,
        part_index: int = 0,
        last_batch: str = "keep",
        even_size: bool = False,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(length, num_parts, part_index, even_size, shuffle, seed)
        self.batch_size = at_least("batch_size", batch_size, 1)
        if last_batch not in LAST_BATCH:
            raise UnknownName(f"last_batch={last_batch!r} must be one of {', '.join(LAST_BATCH)}")
        self._last_batch = last_batch

    def _setting(self) -> dict[str, Any]:
        return super()._setting() | {"batch_size": self.batch_size, "last_batch": self._last_batch}

    def _count(self, epoch: int) -> int:
        if self._last_batch == "keep":
            return -(-self._size // self.batch_size)
        return (self._carried(epoch) + self._size) // self.batch_size

    def _yielded(self, epoch: int, start: int) -> Iterator[list[int]]:
        samples = [*self._carry(epoch), *self._samples(epoch)]
        size = self.batch_size
        return (samples[number * size : (number + 1) * size] for number in range(start, self._count(epoch)))

    def _carried(self, epoch: int) -> int:
        """Return the number of samples that roll over into ``epoch``."""
        return self._size * epoch % self.batch_size if self._last_batch == "rollover" else 0

    def _carry(self, epoch: int) -> list[int]:
        """Return the samples that roll over into ``epoch``, from one or more earlier epochs."""
        wanted = self._carried(epoch)
        carried: list[int] = []
        while len(carried) < wanted:
            epoch -= 1
            carried = [*self._samples(epoch), *carried]
        return carried[len(carried) - wanted :]
