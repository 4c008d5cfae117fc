from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from written import write

from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.tables import NUMBERS, StripeNames, page_name, read_page, rest_name, shared_out
from kvstore.errors import CheckpointError
from kvstore.rows.ids import stripes_of
from kvstore.rows.row_table import RowTable
from kvstore.sealed_folders import MANIFEST
from kvstore.table import MinCount, Table

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4)


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(1, 60), st.integers(4, 64))
def test_any_placement_gives_whole_arrays_and_states(
    tmp_path_factory: Any, shapes: list[list[int]], servers: int, bound: int, longest: int
) -> None:
    arrays = {f"k{i}": torch.rand(shape) for i, shape in enumerate(shapes)}
    states = {(key, "momentum_buffer"): value + 1 for key, value in arrays.items()}
    states |= {(key, "step"): torch.tensor(3.0) for key in arrays}
    folder = write(tmp_path_factory.mktemp("any"), 1, arrays, states, servers, bound, longest)
    with CheckpointReader(folder) as reader:
        for key, value in arrays.items():
            assert torch.equal(reader.value(0, key), value)
        loaded = reader.states(0, arrays)
    assert loaded.keys() == states.keys()
    assert all(torch.equal(loaded[name], states[name]) for name in states)


def test_a_file_that_is_gone_or_another_is_an_error(tmp_path: Path) -> None:
    one, other = (write(tmp_path, number, {"w": torch.ones(number)}, servers=1) for number in (1, 2))
    name = "store-0.server-0.safetensors"
    (one / name).rename(other / name)
    with CheckpointReader(other) as reader, pytest.raises(CheckpointError, match=r"damaged: 0/value is float32\[1\]"):
        reader.value(0, "w")
    with CheckpointReader(one) as reader, pytest.raises(CheckpointError, match="missing"):
        reader.value(0, "w")


def test_a_worker_without_a_part_has_none(tmp_path: Path) -> None:
    with CheckpointReader(write(tmp_path, 1, {"w": torch.ones(2)})) as reader:
        assert reader.part(0) is None


NAME = "store-0.server-1.safetensors"


def test_what_was_written_is_whole(tmp_path: Path) -> None:
    assert verify(write(tmp_path, 4, {"w": torch.rand(1000)})).number == 4


def _flip(folder: Path) -> None:
    data = bytearray((folder / NAME).read_bytes())
    data[-1] ^= 1
    (folder / NAME).write_bytes(data)


def _cut(folder: Path) -> None:
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:-1])


def _older(folder: Path) -> None:
    other = write(folder.parent, 3, {"w": torch.zeros(1000)})
    (other / MANIFEST).replace(folder / MANIFEST)


def _swap(folder: Path) -> None:
    given = json.loads((folder / MANIFEST).read_text())
    given["stores"][0]["segments"][1][0] = 77
    (folder / MANIFEST).write_text(json.dumps(given))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (_flip, "sha256"),
        (_cut, "bytes"),
        (lambda folder: (folder / NAME).unlink(), "missing"),
        (_older, "sha256"),
        (_swap, "77/value"),
        (lambda folder: (folder / MANIFEST).unlink(), "no checkpoint"),
    ],
)
def test_a_directory_that_lies_is_found_out(tmp_path: Path, lie: Callable[[Path], None], said: str) -> None:
    folder = write(tmp_path, 4, {"w": torch.rand(1000)})
    lie(folder)
    with pytest.raises(CheckpointError, match=said):
        verify(folder)


@pytest.mark.parametrize("name", [NAME, MANIFEST])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 4, {"w": torch.rand(1000)})
    (folder / name).unlink()
    os.mkfifo(folder / name)  # nobody writes to it
    with pytest.raises(CheckpointError, match=f"{name}: damaged: it is no plain file"):
        verify(folder)


TABLE = Table(dim=2, admit=MinCount(3))


def test_names_say_what_pages_a_segment_has() -> None:
    names = [page_name(7, page, part) for page in (0, 10) for part in ("ids", "state.exp_avg")]
    found = StripeNames.of([*names, rest_name(7, "young.ids"), "7/value", "7/state/momentum_buffer"])
    assert found == StripeNames({0: ["ids", "state.exp_avg"], 10: ["ids", "state.exp_avg"]}, ["young.ids"])


def test_a_page_that_is_not_of_its_table_is_damaged() -> None:
    tensors = {"1/rows/0/ids": torch.arange(2), "1/rows/0/values": torch.zeros(2, 2), "1/rows/0/seen": torch.ones(2)}
    assert read_page(TABLE, 1, 0, ["ids", "values", "seen"], tensors.__getitem__).rows.shape == (2, 2)
    with pytest.raises(CheckpointError, match="has no ids, or no rows"):
        read_page(TABLE, 1, 0, ["values"], tensors.__getitem__)
    for name, wrong in (("values", torch.zeros(2, 3)), ("values", torch.zeros(2, 2).double()), ("seen", torch.ones(3))):
        with pytest.raises(CheckpointError, match="not of a table of"):
            read_page(TABLE, 1, 0, ["ids", "values", "seen"], (tensors | {f"1/rows/0/{name}": wrong}).__getitem__)


def test_counts_of_ids_without_rows_go_to_the_servers_that_have_the_ids_now() -> None:
    ids = np.arange(40)
    old = [RowTable(TABLE, stripe, 2) for stripe in range(2)]
    for stripe, table in enumerate(old):
        own = ids[stripes_of(TABLE, ids, 2) == stripe]
        for pushed in (own, own[::2]):
            table.update(pushed, np.zeros((len(pushed), 2), np.float32), None)
    rests = shared_out(TABLE, [table.rest() for table in old], [0, 0, 0])
    counted: dict[int, int] = {}
    for stripe, rest in enumerate(rests):
        table = RowTable(TABLE, stripe, 3)
        table.restore(rest)
        assert table.version == 2
        assert set(stripes_of(TABLE, rest["young.ids"], 3)) <= {stripe}
        counted |= dict(zip(rest["young.ids"].tolist(), rest["young.counts"].tolist(), strict=True))
    assert sorted(counted) == ids.tolist()
    assert sum(counted.values()) == 40 + 20
    assert sum(rest[NUMBERS][4] for rest in rests) == 60  # rows that were refused
