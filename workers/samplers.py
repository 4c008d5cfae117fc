"""Torch samplers that split an epoch over workers: which samples are this worker's, and in which order.

An epoch's order depends only on the seed and the epoch. So all workers agree on it without communication, and (epoch,
number of samples used) is enough to resume a run to the bit.

    sampler = SplitSampler(dataset, kvstore=store)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader: ...
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import BatchSampler, Sampler

from kvstore import KVStore, Mismatch, UnknownName, UsageError
from workers import group
from workers.common.checks import at_least
from workers.common.read_ahead import waiting
from workers.common.stores import part_of
from workers.common.torch_internals import has_ended, held_batches, index_sampler, keeps_order, loader_on_stack
from workers.joining import Joinable, join

T = TypeVar("T")
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
        self._epoch = self._start = 0  # where an iteration begins
        self._reading: _Reading[T_co] | None = None  # the iteration of this epoch that was read from last

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return self._parts

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if the current one has been used to its end; the first is 0.

        A look at the last batch, with ``next(iter(loader))``, counts as use: ``set_epoch`` goes back.
        """
        return self._epoch + (self._reading is not None and self._reading.is_over)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``. If it is already under way, nothing changes, so a resumed loop continues.

        Without this call, an epoch that was used to its end is followed by the next one. One that was broken off begins
        again: at its first item, or where ``load_state_dict`` went to.
        """
        at_least("epoch", epoch, 0)
        if epoch != self.epoch:
            # A program may look at a batch before training, for shapes; its epoch has not begun by that.
            looked = epoch == self._epoch and self._reading is not None and self._reading.is_one_batch
            self._go_to(epoch, self._start if looked else 0)

    def __iter__(self) -> Iterator[T_co]:
        return _Reading(self)

    def __len__(self) -> int:
        return self._count(self.epoch)

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the position, and the settings that it depends on, as JSON values.

        Args:
            taken: how many items of this epoch have been used. None counts the items of all batches that torch's
                ``DataLoader``, or ``lookahead`` around it, has given to the program. Batches that only wait in the
                loader, with ``num_workers``, do not count. A program that reads batches ahead by itself passes the
                number.

        Raises:
            UsageError: ``taken`` is more than the epoch has; or it is None, and the items cannot be counted: because
                the loader reads ahead out of order, or through a batch sampler of the program's own.
        """
        epoch, reading = self._epoch, self._reading
        total = self._count(epoch)
        over = reading is not None
        if taken is not None:
            if at_least("taken", taken, 0) > total:
                raise UsageError(f"taken={taken} must be at most {total}, the length of epoch {epoch}")
        elif reading is None:
            taken = self._start
        elif (loader := loader_on_stack()) is not None:
            # torchdata's StatefulDataLoader asks when it has taken the items of a batch, and keeps the answer with that
            # batch. A last batch leaves the rest of the epoch, which is empty, until the loader has found its end.
            taken, over = reading.taken, has_ended(loader)
        else:
            taken = reading.used()
        if taken == total and over:
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
        self._go_to(epoch, min(taken, self._count(epoch)))

    def _go_to(self, epoch: int, start: int = 0) -> None:
        self._epoch, self._start, self._reading = epoch, start, None

    @property
    def _size(self) -> int:
        share, rest = divmod(self._length, self._parts)
        return share + (rest > 0 if self._even else self._index < rest)

    def _samples(self, epoch: int) -> Sequence[int]:
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
        raise NotImplementedError

    def _yielded(self, epoch: int, start: int) -> Iterator[T_co]:
        raise NotImplementedError


class _Reading(Iterator[T_co], Generic[T_co]):
    """An iteration over an epoch of a sampler; it counts what was taken from it, and what of that has been used.

    ``iter()`` changes nothing, and the epoch is found out with the first item: torch's loaders with processes make two
    iterators of a sampler for an epoch, and drop the first.
    """

    def __init__(self, sampler: _Split[T_co]) -> None:
        self._sampler = sampler
        self._items: Iterator[T_co] | None = None
        self._loader: weakref.ref[Any] | None = None  # the iterator of the loader that reads

    def __next__(self) -> T_co:
        if self._items is None:
            self._items = self._begin()
        self._sampler._reading = self
        item = next(self._items)
        self.taken += 1
        return item

    @property
    def is_over(self) -> bool:
        return self.taken == self._total and not any(map(len, self._waiting))

    @property
    def is_one_batch(self) -> bool:
        """Whether a loader has given one batch of it: after that, a program may have looked at it, or used it."""
        return self._loader is not None and self._batch is not None and self.taken - self._start <= self._batch[0]

    def used(self) -> int:
        """Return how many items of the epoch are in batches that the program has been given."""
        dropped = self._loader is not None and self._loader() is None and not self.is_over
        if dropped and self._other is not None and self._other() is not None:
            raise UsageError(
                "two iterations over this sampler are under way, so how much has been used is unknown; pass it: "
                "state_dict(taken=...)"
            )
        behind = sum(map(len, self._waiting))
        if not behind and self._known:
            return self.taken
        if self._batch is None or not self._known:
            raise UsageError(
                "the loader has read ahead, and not in batches of this sampler's items in their order, so how many "
                "items have been used is unknown; pass it: state_dict(taken=...)"
            )
        size, drop_last = self._batch
        taken = self.taken - self._start
        batches = taken // size if drop_last else -(-taken // size)  # only the last is smaller, or dropped
        return self._start + (batches - behind) * size

    def _begin(self) -> Iterator[T_co]:
        sampler = self._sampler
        if sampler.epoch != sampler._epoch:
            sampler._go_to(sampler.epoch)
        self._start = self.taken = sampler._start
        self._total = sampler._count(sampler._epoch)
        loader, before = loader_on_stack(), sampler._reading
        self._other: weakref.ref[Any] | None = None if before is None else before._loader
        self._loader = None if loader is None else weakref.ref(loader)
        in_loader = held_batches(loader)
        self._waiting: list[Sized] = [*waiting(), *([] if in_loader is None else [in_loader])]
        self._known = in_loader is not None
        self._batch = _batch_of(loader, sampler)
        return sampler._yielded(sampler._epoch, self._start)


def _batch_of(loader: Any, sampler: Sampler[Any]) -> tuple[int, bool] | None:
    """Return the size of the loader's batches, and whether an incomplete one is dropped; None if unknown."""
    if loader is None:
        return 1, False
    if not keeps_order(loader):
        return None
    batches = index_sampler(loader)
    if batches is sampler:
        return 1, False
    ours = type(batches) is BatchSampler or type(batches).__module__ == "torchdata.stateful_dataloader.sampler"
    return (batches.batch_size, batches.drop_last) if ours and batches.sampler is sampler else None


def _parts(num_parts: int, part_index: int, kvstore: KVStore | str | None) -> tuple[int, int]:
    if kvstore is None:
        return num_parts, part_index
    if (num_parts, part_index) != (1, 0):
        raise UsageError(
            f"num_parts={num_parts} and part_index={part_index} come from kvstore={kvstore!r}: leave them out"
        )
    store = group.store_of(kvstore)
    return part_of(store.num_workers, store.rank)


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
        kvstore: in place of ``num_parts`` and ``part_index``: a store, whose workers have a part each, or ``auto`` for
            that of ``workers.init``.

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
        kvstore: KVStore | str | None = None,
    ) -> None:
        num_parts, part_index = _parts(num_parts, part_index, kvstore)
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
        kvstore: whose workers have a part each; see ``SplitSampler``.

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
        kvstore: KVStore | str | None = None,
    ) -> None:
        num_parts, part_index = _parts(num_parts, part_index, kvstore)
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
        return self._size * epoch % self.batch_size if self._last_batch == "rollover" else 0

    def _carry(self, epoch: int) -> list[int]:
        """Return the samples that roll over into ``epoch``, from one or more earlier epochs."""
        wanted = self._carried(epoch)
        carried: list[int] = []
        while len(carried) < wanted:
            epoch -= 1
            carried = [*self._samples(epoch), *carried]
        return carried[len(carried) - wanted :]


class ElasticSampler(Sampler[int]):
    """Samples that workers take from one another's epoch as they are ready; for ``DataLoader(..., sampler=...)``.

        sampler = ElasticSampler(dataset, store)
        loader = DataLoader(dataset, 32, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in sampler.passes(loader, trainer):
                ...
                trainer.step()

    Nobody owns a part: each worker asks for the next batch's samples when its loader wants them. So a worker that comes
    later takes part at once, and in asynchronous stores one that is twice as fast uses twice as many. What a worker
    that dies has taken and not used goes to others. Each sample of an epoch is used once, but for those of the step in
    which a worker died, which may be used twice. Workers may have different numbers of batches, and call ``join`` at
    the end, as ``passes`` does; so the weights must be on the servers. ``fit`` takes loaders with this sampler. The
    division differs from run to run, and an epoch that is resumed from a checkpoint begins again.

    Args:
        length: the number of samples, or an object with that length, such as the data set; the same on all workers.
        store: which the workers share.
        shuffle: use another order in each epoch.
        seed: the seed of the order, the same on all workers.
        name: of the data set, if there are several of these samplers.

    Raises:
        UsageError: a number is out of range; or an epoch that is used up is iterated over again.
    """

    def __init__(
        self, length: int | Sized, store: KVStore, *, shuffle: bool = True, seed: int = 0, name: str = "train"
    ) -> None:
        self._length = at_least("length", len(length) if isinstance(length, Sized) else length, 1)
        self._store, self._shuffle, self._name = store, bool(shuffle), name
        self._seed = at_least("seed", seed, 0, 2**64 - 1)
        self.epoch = 0
        self._passes = self._used = self._taken = 0
        self._ended = False  # whether a pass has come to its end, and ``is_over`` has not been asked since

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``. If it is already under way, nothing changes."""
        if at_least("epoch", epoch, 0) != self.epoch:
            self.epoch, self._passes, self._used, self._taken = epoch, 0, 0, 0
            self._ended = False

    def passes(self, batches: Iterable[T], *joined: Joinable) -> Iterator[T]:
        """Yield the batches of an epoch, and join; again, if samples of a worker that died have come back.

        Args:
            batches: a loader with this sampler.
            joined: the arguments of ``workers.join``: the trainer, or the store.
        """
        while True:
            yield from batches
            join(*joined)
            if self.is_over():
                return

    def is_over(self) -> bool:
        """Return whether the epoch is over; after each ``join``, on all workers. If not, iterate and join again."""
        self._passes += 1
        self._used, self._ended = self._taken, False
        share = self._store.take_share(
            self._length, 0, data=self._name, epoch=self.epoch, used=self._used, passes=self._passes
        )
        return share.over

    def __len__(self) -> int:
        """An equal worker's part: how many it will be nobody knows."""
        return -(-self._length // self._store.num_workers)

    def __iter__(self) -> Iterator[int]:
        if self._ended:  # another pass would have no sample, and a loop over epochs would seem to train
            raise UsageError(
                f"epoch {self.epoch} of this ElasticSampler has been used up: call set_epoch(epoch) before each epoch, "
                "and iterate over sampler.passes(loader, trainer)"
            )
        order = np.arange(self._length)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        loader = loader_on_stack()
        size, _ = _batch_of(loader, self) or (None, False)
        held = held_batches(loader)
        before = self._taken
        while True:
            if size is not None and held is not None:
                # The loader asks for the next batch, so the program is done with all that it has got. A loader with
                # processes asks while it hands a batch out: that one is neither held nor done.
                done = (self._taken - before) // size - len(held) - (held != ())
                self._used = max(self._used, before + max(0, done) * size)
            start, stop, _ = self._store.take_share(
                self._length, size or 1, data=self._name, epoch=self.epoch, used=self._used
            )
            if start == stop:
                self._ended = True
                return
            self._taken += stop - start
            yield from order[start:stop].tolist()
