"""Each worker's part of data that all workers were given whole; what is divided already is left alone.

Whether data is the same everywhere is found out, not guessed from classes: the workers compare the order that their
samplers give with one seed, and a few samples that are read with one seed. A sampler that divides by rank gives another
order on each worker, and a ``Subset`` by rank has other samples.
"""

from __future__ import annotations

import hashlib
import random
import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from kvstore import Mismatch, UsageError
from workers.common.run_log import log_line
from workers.common.stores import part_of
from workers.common.torch_internals import index_sampler, with_samplers
from workers.embedding.prefetching import Lookahead
from workers.fitting import randomness
from workers.reducer import Reducer
from workers.samplers import ElasticSampler, SplitSampler

_LOADERS = (
    ("torch.utils.data.dataloader", "DataLoader"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"),
)
_STATELESS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler)
_READ = 5  # samples that are compared, evenly from the first of the order to the last
_AGAIN = 3  # times that they are read again where they differ: a picture that is flipped or not is often the same
_SLOTS = 8  # parts of a sample, such as a picture and its label, that are compared by themselves
_DIGITS = 40  # bits of a digest: sums of as many stay exact in float64 with 8,000 workers
_drawing = threading.Lock()  # the random numbers of the process are everybody's

Order: TypeAlias = "list[Any] | array[int]"  # numbers take a quarter of the memory in an array


class DividedSampler(SplitSampler):
    """Every ``num_parts``-th item that another sampler yields. The seed and the epoch are the random numbers' seed.

    So the batches of one step on all workers are together a batch of the one process for which the program was written.
    """

    def __init__(self, source: Any, length: int, num_parts: int, part_index: int, even_size: bool, seed: int) -> None:
        super().__init__(length, num_parts, part_index, even_size, seed=seed)
        self._source = source
        self._drawn: dict[int, Order] = {}  # this epoch's and the next one's

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        state = super().state_dict(taken)
        return state | {"order": self.digest(state["epoch"]) if state["taken"] else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        seed = state.get("seed")
        if isinstance(seed, int) and 0 <= seed < 2**64:
            self._seed, self._drawn = seed, {}
        super().load_state_dict(state)
        if state["taken"] and state.get("order") != self.digest(self._epoch):
            raise Mismatch(
                f"the sampler, a {self.source}, gives another order of epoch {self._epoch} than in the run that saved "
                "it: resume from the end of an epoch, or give it a state_dict and pass split=False"
            )

    @property
    def source(self) -> str:
        return type(self._source).__name__

    def digest(self, epoch: int) -> int:
        return _digest_of_order(self._order(epoch))

    def _order(self, epoch: int) -> Order:
        # Each once: a sampler of the program's own may give something else when it is asked again.
        if epoch not in self._drawn:
            self._drawn = {number: order for number, order in self._drawn.items() if abs(number - epoch) == 1}
            self._drawn[epoch] = draw(self._source, self._seed, epoch)
        return self._drawn[epoch]

    def _samples(self, epoch: int) -> list[Any]:
        order = self._order(epoch)
        mine = list(order[self._index :: self._parts])
        if len(mine) < self._count(epoch):  # the next ones, from the beginning again
            mine.append(order[(self._index + len(mine) * self._parts) % len(order)])
        return mine

    def _count(self, epoch: int) -> int:
        share, rest = divmod(len(self._order(epoch)), self._parts)
        return share + (rest > 0 if self._even else self._index < rest)


class Divided(NamedTuple):
    """Data for a worker, and its part if it was divided."""

    data: Any
    part: DividedSampler | None


def divide(
    data: Any, what: str, split: bool | None, reducer: Reducer, rank: int, num_workers: int, even_size: bool = False
) -> Divided:
    """Return this worker's part of ``data`` if all workers were given the same. Every worker calls this.

    Rank 0 logs what was done. With one worker nothing is done.

    Args:
        split: False leaves data as it is; True divides, or raises; None divides what is the same everywhere.
        even_size: give all workers as many samples or batches; one that lacks one gets another's, too.
    """
    if num_workers == 1:
        return Divided(data, None)
    loader: Any = data.loader if isinstance(data, Lookahead) else data
    order, reason = None, "split=False"
    if isinstance(getattr(loader, "sampler", None), ElasticSampler):  # whose samples are gone once they are looked at
        reason = "its ElasticSampler shares it out while it is used"
    elif split is not False:
        order, reason = _whole(loader)
        reason = _compared(loader, order, reason, reducer)
    if split and reason:
        raise UsageError(f"split=True, but the {what} data cannot be divided: {reason}")
    if reason or order is None:
        _log(f"is left as it is: {reason}", what, loader, _items(loader), reducer, rank, num_workers)
        return Divided(data, None)
    part_of(num_workers, rank)
    sampler = index_sampler(loader) if _given_batches(loader) else loader.sampler
    if parts := _parts_of(sampler):
        raise UsageError(
            f"every worker has been given the same part of {parts} of the {what} data: pass each worker's own rank to "
            "the sampler, such as store.rank"
        )
    seed = (loader.generator or torch.default_generator).initial_seed() % 2**_DIGITS
    seed = int(reducer.sum({"seed": seed if rank == 0 else 0})["seed"])
    part = DividedSampler(sampler, len(loader.dataset), num_workers, rank, even_size, seed)
    mine = _with_part(loader, part)
    _log(
        f"is the same on all {num_workers} workers, and each takes its own part",
        what,
        mine,
        len(part),
        reducer,
        rank,
        num_workers,
    )
    return Divided(data.over(mine) if isinstance(data, Lookahead) else mine, part)


def require_same_order(part: DividedSampler, epoch: int, reducer: Reducer) -> None:
    if not _same(part.digest(epoch), reducer):
        raise UsageError(
            f"the sampler, a {part.source}, gives another order on other workers in epoch {epoch}, so it cannot be "
            "divided: divide by store.rank in the program, and pass split=False"
        )


def draw(sampler: Any, seed: int, epoch: int) -> Order:
    """Return what ``sampler`` yields in ``epoch`` with random numbers by ``seed``. No random state is changed."""
    with _seeded(seed, epoch, [each.generator for each in _chain(sampler) if hasattr(each, "generator")]):
        for each in _chain(sampler):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)
        length = len(sampler)
        order = list(islice(sampler, length + 1))  # one without end is not read for ever
    if len(order) > length:
        raise UsageError(f"a {type(sampler).__name__} of length {length} yields more items than that")
    return array("q", order) if all(type(each) is int for each in order) else order


# ---- helpers


def _whole(loader: Any) -> tuple[Order | None, str]:
    """Return the order of the samples or batches with a fixed seed; or None, and why it cannot be divided."""
    kind = type(loader)
    if (kind.__module__, kind.__name__) not in _LOADERS:
        if isinstance(loader, DataLoader):
            return None, f"a {kind.__name__} may do more than torch's DataLoader"
        return None, f"a {kind.__name__} gives batches, and only the samples of a DataLoader can be divided"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return None, f"a {type(loader.dataset).__name__} has no length, or can only be iterated over"
    sampler = index_sampler(loader) if _given_batches(loader) else loader.sampler
    try:
        if not all(type(each) in _STATELESS for each in _chain(sampler)):
            kept = [loader.dataset, *(getattr(each, "dataset", None) for each in _chain(sampler))]
            sampler = deepcopy(sampler, {id(each): each for each in kept})  # the loop's own iterations are the first
        return draw(sampler, 0, 0), ""
    except Exception as exc:
        return None, f"the order of its {type(sampler).__name__} cannot be compared: {type(exc).__name__}: {exc}"


def _compared(loader: Any, order: Order | None, reason: str, reducer: Reducer) -> str:
    """Return why the data is not the same on all workers, or cannot be divided; "" if it can. All workers call this."""
    facts: tuple[Any, ...] = ()
    if order is not None:
        kinds = [f"{type(each).__module__}.{type(each).__qualname__}" for each in (loader.dataset, loader.sampler)]
        chosen = list(loader.dataset.indices) if isinstance(loader.dataset, Subset) else []
        facts = *kinds, len(loader.dataset), chosen, loader.batch_size, loader.drop_last, _digest_of_order(order)
    if not all(row["whole"] for row in reducer.gather({"whole": order is not None}).values()):
        said = reason or "another worker's data cannot be divided"
        return f"{said}; if all workers were given the same, divide it by store.rank"
    if not _same(_digest(repr(facts)), reducer):
        return "the workers' data sets or samplers differ"
    first = _read(loader, order or [])
    if _same(_digest(repr(first)), reducer):
        return ""
    # What a data set draws with a generator of its own differs from one read to the next, too, and says nothing.
    again = [_read(loader, order or []) for _ in range(_AGAIN)]
    changes = {f"slot {slot}": any(each[slot] != first[slot] for each in again) for slot in range(_SLOTS)}
    steady = [digest for digest, count in zip(first, reducer.sum(changes).values(), strict=True) if not count]
    return "" if _same(_digest(repr(steady)), reducer) else "the workers' samples differ"


def _same(own: int, reducer: Reducer) -> bool:
    """Return on all workers whether all have the same number."""
    return len({row["compared"] for row in reducer.gather({"compared": own}).values()}) == 1


def _read(loader: Any, order: Order) -> list[int]:
    """Return digests of a few samples, read with fixed random numbers: one for each slot.

    They are read in a process if the loader has processes: a file or a device that a data set opens with its first
    sample must not be opened before the loader's processes are forked.
    """
    places = sorted({(len(order) - 1) * number // (_READ - 1) for number in range(_READ)}) if order else []
    items: list[Any] = [order[place] for place in places]
    if _given_batches(loader) and loader.batch_sampler is not None:
        items = [batch[0] for batch in items if len(batch)]
    several = loader.num_workers > 0
    reader = DataLoader(
        _Words(loader.dataset),
        batch_size=None,
        sampler=items,
        num_workers=int(several),
        collate_fn=_as_it_is,
        worker_init_fn=loader.worker_init_fn if several else None,
        multiprocessing_context=loader.multiprocessing_context if several else None,
        generator=torch.Generator("cpu"),  # the process's own gives no number for this
    )
    read = list(reader)
    return [_digest(repr([words[slot] for words in read])) for slot in range(_SLOTS)]


class _Words(Dataset[list[str]]):
    """The samples of a data set as texts for each slot. One that cannot be read has the class of its error."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, item: Any) -> list[str]:
        with _seeded(0, 0, []):
            try:
                sample = self._dataset[item]
            except Exception as exc:
                sample = type(exc).__name__
        parts = list(sample.values()) if isinstance(sample, Mapping) else sample
        words = [_words(part) for part in (parts if isinstance(parts, list | tuple) else [parts])]
        return ["".join(words[slot::_SLOTS]) for slot in range(_SLOTS)]


def _as_it_is(value: Any) -> Any:
    return value


def _words(value: Any) -> str:
    """Return a text that tells samples apart.

    Floats are rounded, for another processor may decode a picture a bit differently.
    """
    if isinstance(value, Mapping):
        return repr([(name, _words(element)) for name, element in value.items()])
    if isinstance(value, list | tuple):
        return repr([_words(element) for element in value])
    if isinstance(value, str | bytes | int | None):
        return repr(value)
    try:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.double()  # numpy has no bfloat16
        elements = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        flat = elements.reshape(-1)
        picked = flat[:: max(1, len(flat) // 64)].tolist()
    except Exception:
        return type(value).__name__
    if elements.dtype == object:
        return type(value).__name__
    return repr((elements.shape, [f"{each:.3g}" if isinstance(each, float) else each for each in picked]))


def _digest(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[: _DIGITS // 8], "big")


def _digest_of_order(order: Order) -> int:
    return _digest(order.tobytes() if isinstance(order, array) else repr(order))


@contextmanager
def _seeded(seed: int, epoch: int, generators: list[Any]) -> Iterator[None]:
    """Give torch's CPU generator, numpy's, Python's, and ``generators``, seeds for the block; then put all back."""
    own = [each for each in generators if isinstance(each, torch.Generator)]
    words = np.random.SeedSequence([seed, epoch]).generate_state(4)
    with _drawing:
        states = [each.get_state() for each in own]
        tensors, plain = randomness.state(())
        try:
            torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed is for devices, too
            np.random.seed(int(words[1]))
            random.seed(int(words[2]))
            for each in own:
                each.manual_seed(int(words[3]))
            yield
        finally:
            randomness.load(tensors, plain, ())
            for each, state in zip(own, states, strict=True):
                each.set_state(state)


def _chain(sampler: Any) -> list[Any]:
    """Return a sampler and the ones that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _given_batches(loader: Any) -> bool:
    """Whether the program chose what is in a batch: a batch sampler, or a sampler of what the data set is asked for."""
    return loader.batch_size is None


def _parts_of(sampler: Any) -> int:
    """Return of how many parts a sampler says that it yields one; 0 if it does not."""
    told = [getattr(each, name, 1) for each in _chain(sampler) for name in ("num_parts", "num_replicas")]
    return max((each for each in told if isinstance(each, int) and each > 1), default=0)


def _with_part(loader: Any, part: DividedSampler) -> Any:
    """Return a loader like ``loader`` with ``part`` in place of its sampler."""
    if loader.batch_size is not None:
        batches = type(loader.batch_sampler)(part, loader.batch_size, loader.drop_last)
        return with_samplers(loader, sampler=part, batch_sampler=batches)
    return with_samplers(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": part})


def _items(loader: Any) -> int | None:
    try:
        return len(loader.sampler if getattr(loader, "batch_size", None) is not None else loader)
    except (AttributeError, TypeError):
        return None


def _log(did: str, what: str, loader: Any, mine: int | None, reducer: Reducer, rank: int, num_workers: int) -> None:
    """Let rank 0 say what was done, and how much each worker has."""
    unit = "samples" if getattr(loader, "batch_size", None) is not None else "batches"
    told = reducer.sum({"count": mine or 0, "known": mine is not None})
    if told["known"] < num_workers:
        has = f"their numbers of {unit} are unknown"
    elif told["count"] == (mine or 0) * num_workers:
        has = f"each worker has {mine} {unit}"
    else:
        has = f"worker {rank} has {mine} of {told['count']:.0f} {unit}"
    if rank == 0:
        log_line(rank, "The %s data %s; %s", what, did, has)
