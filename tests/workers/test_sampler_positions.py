"""A sampler's position counts what the program has been given, however its loader reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from kvstore import UsageError
from workers import SplitBatchSampler, SplitSampler

SAMPLES, EPOCHS = 22, 2  # 11 for each of two parts: batches of 3, 3, 3 and 2


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, item: Any) -> torch.Tensor:
        return torch.tensor(item)


class OwnBatches(BatchSampler):
    """A batch sampler of a program's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from sorted(super().__iter__())


def made(kind: str, processes: int = 0, loader: Any = DataLoader, **options: Any) -> tuple[Any, Any]:
    """A sampler of one of two parts, and a loader."""
    if processes:
        options["num_workers"] = processes
    if kind == "samples":
        sampler: Any = SplitSampler(SAMPLES, 2)
        return sampler, loader(Numbers(), batch_size=3, sampler=sampler, **options)
    sampler = SplitBatchSampler(SAMPLES, 3, 2)
    if kind == "batches":
        return sampler, loader(Numbers(), batch_sampler=sampler, **options)
    return sampler, loader(Numbers(), batch_size=None, sampler=sampler, **options)


def loop(sampler: Any, loader: Any, stop: int | None = None, look: bool = False, tell: bool = False) -> list[Any]:
    """The loop of a program, up to a batch; with the epoch of each batch."""
    batches = []
    for epoch in range(sampler.epoch, EPOCHS):
        if tell:
            sampler.set_epoch(epoch)
        if look and not batches:
            next(iter(loader))
        for batch in loader:
            batches.append((epoch, batch.tolist()))
            if len(batches) == stop:
                return batches
    return batches


KINDS = ["samples", "batches", "no batching"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("processes", "options"), [(0, {}), (2, {}), (2, {"persistent_workers": True})])
def test_a_resumed_loop_has_the_rest_whatever_was_read_ahead_or_looked_at(
    kind: str, processes: int, options: dict[str, Any]
) -> None:
    whole = loop(*made(kind))
    assert len(whole) == 8
    for stop, look in ((2, True), (5, False)):
        sampler, loader = made(kind, processes, **options)
        before = loop(sampler, loader, stop, look, tell=look)
        state = sampler.state_dict()
        resumed, again = made(kind, processes, **options)
        resumed.load_state_dict(state)
        assert before + loop(resumed, again, look=look, tell=look) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("kind", ["samples", "batches"])
@pytest.mark.parametrize("processes", [0, 2])
def test_torchdatas_loader_keeps_the_position_of_the_sampler(kind: str, processes: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    whole = loop(*made(kind))
    for stop in (2, 4):  # within an epoch, and after its last batch
        sampler, loader = made(kind, processes, stateful)
        before = loop(sampler, loader, stop)
        state, own = loader.state_dict(), sampler.state_dict()
        resumed, again = made(kind, processes, stateful)
        again.load_state_dict(state)
        after = [batch.tolist() for _ in range(EPOCHS) for batch in again]
        assert [batch for _, batch in before] + after == [batch for _, batch in whole]
        resumed, again = made(kind, processes, stateful)
        resumed.load_state_dict(own)
        assert before + loop(resumed, again) == whole


def test_making_an_iterator_changes_nothing() -> None:
    sampler = SplitBatchSampler(SAMPLES, 3, 2)
    whole = list(sampler)
    resumed = SplitBatchSampler(SAMPLES, 3, 2)
    resumed.load_state_dict({**resumed.state_dict(), "taken": 2})
    dropped, read = iter(resumed), iter(resumed)  # as torch's loaders with processes do
    assert list(read) == whole[2:]
    assert resumed.epoch == 1
    resumed.set_epoch(0)
    assert next(dropped) == whole[0]


def test_what_was_resumed_begins_again_where_it_was_resumed() -> None:
    whole = list(SplitSampler(SAMPLES))
    sampler = SplitSampler(SAMPLES)
    sampler.load_state_dict(sampler.state_dict(5))
    assert next(iter(sampler)) == whole[5]
    assert list(sampler) == whole[5:]
    sampler.set_epoch(0)
    assert list(sampler) == whole


@pytest.mark.parametrize("processes", [0, 2])
def test_a_look_at_an_epochs_last_batch_does_not_end_it_if_the_epoch_is_told(processes: int) -> None:
    sampler, loader = made("samples", processes)
    sampler.load_state_dict(sampler.state_dict(9))
    next(iter(loader))
    sampler.set_epoch(0)
    assert [len(batch) for batch in loader] == [2]


@pytest.mark.parametrize("options", [{"in_order": False}, {}])
def test_what_cannot_be_counted_is_an_error(options: dict[str, Any]) -> None:
    sampler = SplitSampler(SAMPLES)
    batches: Any = (BatchSampler if options else OwnBatches)(sampler, 3, False)
    try:
        loader = DataLoader(Numbers(), batch_sampler=batches, num_workers=1, **options)
    except TypeError:
        pytest.skip("this torch's loader always keeps the order")
    reading = iter(loader)
    next(reading)
    with pytest.raises(UsageError, match=r"the loader has read ahead, .* pass it: state_dict\(taken=...\)"):
        sampler.state_dict()
    assert sampler.state_dict(taken=3)["taken"] == 3
    assert len(list(reading)) == 7
    assert sampler.state_dict()["epoch"] == 1


def test_a_look_in_the_middle_of_a_loop_is_not_taken_for_the_position() -> None:
    sampler, loader = made("samples")
    reading = iter(loader)
    next(reading)
    next(reading)
    next(iter(loader))
    with pytest.raises(UsageError, match="two iterations over this sampler are under way"):
        sampler.state_dict()
    next(reading)
    assert sampler.state_dict()["taken"] == 9
