"""Published values against full copies of every version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.changes import apply_changes, checksum
from kvstore.errors import UsageError, WireError
from servers.store.publishing import BLOCK, PublishedValues

DTYPES = [("float32", "bfloat16"), ("float32", "float16"), ("float32", "float32"), ("float64", "bfloat16")]
DTYPES += [("bfloat16", "bfloat16"), ("int64", "int64"), ("uint8", "uint8"), ("float64", "float32")]


def bits(values: torch.Tensor, dtype: str) -> Any:
    """The bits that must be published, element by element; all NaNs of a narrowed dtype are one."""
    rounded = values.to(getattr(torch, dtype))
    if values.dtype != rounded.dtype:
        rounded[rounded.isnan()] = float("nan")
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rounded.itemsize]
    return rounded.view(signed).numpy().view(f"u{rounded.itemsize}").copy()


class Model:
    """A publisher, and what every reader of any version must get from it."""

    def __init__(self, size: int, source: str, dtype: str) -> None:
        self.size, self.source, self.dtype = size, source, dtype
        self.published = PublishedValues(size, source, dtype)
        self.copies: dict[int, Any] = {}
        self.versions: list[int] = []
        self.previous: int | None = None

    def publish(self, values: torch.Tensor, version: int, keep: bool = False) -> None:
        """Publish; with ``keep`` the version stays that is previous now."""
        new = bits(values, self.dtype)
        old = self.copies.get(self.versions[-1]) if self.versions else None
        if not keep or self.previous is None:
            self.previous = self.published.newest
        changed = self.published.publish(values, version, self.previous if keep else None)
        assert changed == (self.size if old is None else np.count_nonzero(new != old))
        self.copies[version] = new
        self.versions.append(version)
        assert (self.published.newest, self.published.previous) == (version, self.previous)

    def check(self, since: int | None, at: int) -> int:
        """Return the bytes of the answer that makes ``since`` into ``at``, which it must do exactly."""
        buffers = self.published.changes(since, at)
        assert buffers is not None
        held = self.copies[at] * 0 + 7 if since is None else self.copies[since].copy()
        apply_changes(buffers, held)
        assert held.tobytes() == self.copies[at].tobytes()
        assert self.published.checksum(at) == checksum(self.copies[at])
        return sum(memoryview(buffer).nbytes for buffer in buffers)

    def check_all(self) -> None:
        there = [at for at in self.versions if at in (self.versions[-1], self.previous)]
        for at in there:
            for since in [None, *self.versions]:
                self.check(since, at)
        for gone in set(self.versions) - set(there):
            assert self.published.changes(None, gone) is None
            assert self.published.checksum(gone) is None

    def restored(self) -> None:
        """Go on with a new publisher that has the state of this one."""
        tensors, plain = self.published.state()
        self.published = PublishedValues(self.size, self.source, self.dtype)
        self.published.restore({name: tensor.clone() for name, tensor in tensors.items()}, dict(plain))
        for since in self.versions:
            self.check(since, self.versions[-1])
        self.previous = None
        assert self.published.previous is None


SPECIAL = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), 1e-42, 1.0, 1.0 + 1e-4, 65519.9, 1e30]


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 9, 700]),
    st.lists(
        st.tuples(st.integers(1, 3), st.floats(0, 1), st.sampled_from([False, False, False, True]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_version_becomes_the_newest_and_the_one_before_to_the_bit(
    dtypes: tuple[str, str], size: int, steps: list[tuple[int, float, bool, bool]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    model, version = Model(size, *dtypes), 0
    values = torch.zeros(size, dtype=getattr(torch, dtypes[0]))
    for skipped, share, restore, keep in steps:
        version += skipped
        where = torch.from_numpy(np.flatnonzero(rng.random(size) < share**3))
        chosen = torch.from_numpy(rng.choice(SPECIAL, len(where)))
        values[where] = (
            chosen.nan_to_num(3, 4, 5).clamp(0, 200).to(values.dtype) if "int" in dtypes[1] else chosen.to(values.dtype)
        )
        model.publish(values, version, keep)
        model.check_all()
        if restore:
            model.restored()
            if len(model.versions) > 1:
                assert model.published.changes(None, model.versions[-2]) is None
            model.publish(values, version := version + 1)


def test_readers_of_a_thousand_versions_are_served_and_the_last_240_in_few_bytes() -> None:
    size, rng = 20_000, np.random.default_rng(1)
    model = Model(size, "float32", "bfloat16")
    values = torch.from_numpy(rng.standard_normal(size).astype(np.float32))
    for version in range(1, 1001):
        values[int(rng.integers(size))] *= 1.5
        if version % 10:  # else nothing changes, which uses up no mark
            values[version % size] *= -1
        model.publish(values, version)
        if version % 41 == 0:
            for since in (1, max(1, version - 300), version - 30, version - 1):
                for at in model.versions[-2:]:
                    model.check(since, at)
        if version == 700:
            model.restored()
    assert model.check(760, 1000) <= 8 + 240 * 2 * (2 + 2)
    assert model.check(700, 1000) == 8 + 2 * size  # forgotten: all of it


def test_changes_in_some_blocks_of_many_are_found_and_undone() -> None:
    size = 2 * BLOCK + 1000
    model = Model(size, "float32", "bfloat16")
    values = torch.arange(size, dtype=torch.float32)
    model.publish(values, 1)
    values[[0, BLOCK - 1, BLOCK, size - 1]] = -1
    model.publish(values, 2)
    assert model.check(1, 2) < 100
    values[BLOCK : BLOCK + 200_000] *= -2  # most of one block
    values[5] = -1
    model.publish(values, 3)
    model.check_all()
    model.publish(values, 9)  # nothing
    model.check_all()
    assert model.check(3, 9) == 0


def test_a_version_that_is_kept_while_others_come_takes_the_memory_of_its_changed_elements_once() -> None:
    size = 2 * BLOCK + 1000
    model = Model(size, "float32", "bfloat16")
    values = torch.arange(1, size + 1, dtype=torch.float32)
    model.publish(values, 1)
    for version in range(2, 9):
        values[: 5000 if version < 8 else BLOCK] *= -2  # the same of the first block, and then all
        values[BLOCK : BLOCK + 200_000] *= -2 if version < 4 else 1  # most of the second, twice
        values[2 * BLOCK - version] *= -2 if version > 3 else 1  # and then others
        values[2 * BLOCK + version] *= -2  # in the last block each time another one
        model.publish(values, version, keep=True)
        model.check_all()
        whole = 1 + (version == 8)
        assert model.published.nbytes == 3 * (size + whole * BLOCK + 5000 + version - 1) + 6 * (5000 + version - 1)
    assert model.previous == 1
    model.publish(values, 9)
    assert model.published.nbytes == (2 + 1) * size


def test_a_kept_version_goes_when_so_many_changes_are_forgotten() -> None:
    model, values = Model(1000, "float32", "float32"), torch.zeros(1000)
    model.publish(values, 1)
    for version in range(2, 700):
        values[version % 50] += 1
        before = model.published.previous
        model.published.publish(values, version, before)
        model.copies[version] = bits(values, "float32")
        for at in {version, model.published.previous} - {None}:
            for since in (None, version - 1, before, at):
                model.check(since, at)
        if before == model.published.previous and before is not None and before > 1:
            assert model.check(before - 1, before) <= 24
        assert model.published.nbytes < 1000 * 5 + 300 * 9
    assert (model.published.previous or 0) > 400


def test_going_back_from_the_newest_version_costs_its_changes() -> None:
    model = Model(10_000, "float32", "bfloat16")
    values = torch.zeros(10_000)
    model.publish(values, 1)
    values[::100] = 1
    model.publish(values, 2)
    assert model.check(2, 1) < 400


def test_the_version_before_costs_none_of_the_newest_versions_changes() -> None:
    model = Model(10_000, "float32", "bfloat16")
    values = torch.zeros(10_000)
    model.publish(values, 1)
    values[7] = 1
    model.publish(values, 2)
    values[::3] = 2
    model.publish(values, 3)
    assert model.check(1, 2) <= 24


def test_a_nan_is_published_with_the_same_bits_wherever_it_lies() -> None:
    for dtype, expected in (("bfloat16", 0x7FC0), ("float16", 0x7E00)):
        published = PublishedValues(100, "float32", dtype)
        published.publish(torch.full((200,), -float("nan"))[::2], 1)
        out = np.zeros(100, np.uint16)
        apply_changes(published.changes(None, 1) or [], out)
        assert set(out.tolist()) == {expected}
        assert published.publish(torch.full((100,), float("nan")), 2) == 0  # torch's bits differ; nothing has changed
        assert published.publish(torch.zeros(100), 3) == 100
        assert published.publish(torch.full((100,), float("nan")), 4) == 100
        apply_changes(published.changes(3, 4) or [], out)
        assert set(out.tolist()) == {expected}


@pytest.mark.parametrize(("size", "start"), [(2 * BLOCK, 0), (2 * BLOCK, 1), (BLOCK + 1002, 0), (BLOCK + 1001, 3)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "uint8", "int32"])
def test_changes_are_found_in_whole_words_and_where_there_are_none(size: int, start: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    values = torch.zeros(start + size, dtype=getattr(torch, dtype))[start:]
    model = Model(size, dtype, dtype)
    model.publish(values, 1)
    for version, count in enumerate((1, size // 100, size // 10, size // 3, size - 1), 2):
        values[torch.from_numpy(rng.permutation(size)[:count])] += 1
        model.publish(values, version)
        model.check(version - 1, version)


def test_numbers_of_versions_rise() -> None:
    published = PublishedValues(3, "float32", "float32")
    assert published.changes(None, 1) is None
    published.publish(torch.zeros(3), 5)
    for version in (5, 4):
        with pytest.raises(UsageError, match=f"version {version} cannot be published after version 5"):
            published.publish(torch.ones(3), version)
    assert published.changes(5, 5) == []
    assert published.changes(6, 5) == published.changes(None, 5)  # of another course: all of it


def test_a_state_that_cannot_be_is_refused() -> None:
    published = PublishedValues(4, "float32", "bfloat16")
    published.publish(torch.zeros(4), 1)
    published.publish(torch.ones(4), 2)
    tensors, plain = published.state()
    other = PublishedValues(4, "float32", "bfloat16")
    for bad_tensors, bad_plain in [
        ({}, plain),
        (tensors | {"bits": torch.zeros(7, dtype=torch.uint8)}, plain),
        (tensors | {"marks": torch.zeros(4, dtype=torch.int8)}, plain),
        (tensors | {"marks": torch.full((4,), 2, dtype=torch.uint8)}, plain),
        (tensors, plain | {"changes": [2, 1]}),
        (tensors, plain | {"changes": [1, 3]}),
        (tensors, plain | {"changes": ["1"]}),
        (tensors, plain | {"changes": list(range(-300, 2))}),
        (tensors, plain | {"newest": None}),
    ]:
        with pytest.raises(WireError):
            other.restore(bad_tensors, bad_plain)
        assert other.newest is None


def test_the_memory_is_the_copy_and_a_byte_an_element() -> None:
    published = PublishedValues(BLOCK, "float32", "bfloat16")
    values = torch.zeros(BLOCK)
    published.publish(values, 1)
    assert published.nbytes == 3 * BLOCK
    values[::100] = 1
    published.publish(values, 2)
    assert published.nbytes < 3.1 * BLOCK
    published.publish(values - 1, 3)
    assert published.nbytes == 6 * BLOCK  # all of the version before
