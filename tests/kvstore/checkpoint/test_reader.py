"""Checkpoints read without a job: by a program, by ``kvstore-checkpoint``, and into stateful objects."""

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
from safetensors.torch import load_file
from written import write

import kvstore as kv
from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.command import main
from kvstore.checkpoint.exported import ExportedTable, export
from kvstore.checkpoint.stateful import packed, unpacked
from kvstore.checkpoint.tables import NUMBERS, StripeNames, page_name, read_page, rest_name, shared_out
from kvstore.checkpoint.tensors import require_names
from kvstore.errors import CheckpointError, UsageError
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import narrowed
from kvstore.rows.ids import stripes_of
from kvstore.rows.row_table import RowTable
from kvstore.sealed_folders import MANIFEST
from kvstore.table import MinCount, Table

# ---- reader


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
    half, bits = Table(dim=2, dtype="bfloat16"), torch.zeros(2, 2, dtype=torch.int16)
    for values in (bits.view(torch.bfloat16), bits, bits.half()):
        read = (tensors | {"1/rows/0/values": values}).__getitem__
        if values.dtype == torch.bfloat16:
            assert read_page(half, 1, 0, ["ids", "values"], read).rows.dtype == np.int16
        else:
            with pytest.raises(CheckpointError, match="not of a table of bfloat16"):
                read_page(half, 1, 0, ["ids", "values"], read)


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


# ---- command


def test_list_verify_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, {"w": torch.ones(3)})
    write(tmp_path, 2, {"w": torch.ones(3)}, whole=False)
    assert main(["list", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("checkpoint-00000001  10 rounds")
    assert second == "checkpoint-00000002  unfinished"
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.ones(3))
    assert main(["verify", str(tmp_path)]) == 0
    assert "checkpoint-00000001: whole, 2 files" in capsys.readouterr().out


def test_damage_ends_the_command_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "empty")]) == 1
    assert "no checkpoint there" in capsys.readouterr().err
    for number in (1, 2):
        folder = write(tmp_path, number, {"w": torch.ones(3)})
    (folder / "store-0.server-0.safetensors").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "checkpoint-00000001: whole" in said.out
    assert "checkpoint-00000002: DAMAGED" in said.out
    assert "missing" in said.err
    (folder / "manifest.json").write_text("{}")
    assert main(["list", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "checkpoint-00000002  damaged" in said.out
    assert "1 of 2 are damaged" in said.err
    assert main(["list", str(tmp_path / "empty")]) == 1
    assert "no checkpoint there" in capsys.readouterr().err


def test_an_export_is_a_plain_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 1))
    arrays = {name: value.detach() for name, value in model.named_parameters()}
    states = {(name, "momentum_buffer"): value + 1 for name, value in arrays.items()}
    folder = write(tmp_path, 2, arrays, states, servers=3)
    export(folder, tmp_path / "plain.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 1))
    other.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))
    export(folder, tmp_path / "all.safetensors", states=True)
    assert torch.equal(load_file(tmp_path / "all.safetensors")["0.weight.momentum_buffer"], arrays["0.weight"] + 1)


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no store 1: it has 1"):
        export(write(tmp_path, 2, {"w": torch.ones(1)}), tmp_path / "out", store=1)


def test_states_and_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    arrays = {"a": torch.ones(2), "a.exp_avg": torch.zeros(2)}
    folder, out = write(tmp_path, 2, arrays, {("a", "exp_avg"): torch.ones(2)}), tmp_path / "out.safetensors"
    out.write_text("before")
    message = r"array 'a.exp_avg' and state 'exp_avg' of array 'a' would both have the name 'a.exp_avg'.* leave out"
    with pytest.raises(CheckpointError, match=message):
        export(folder, out, states=True)
    assert out.read_text() == "before"
    assert not list(tmp_path.glob(".*.part"))
    export(folder, out)
    assert sorted(load_file(out)) == ["a", "a.exp_avg"]


def test_a_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="array '__metadata__' is named '__metadata__', which safetensors keeps"):
        export(write(tmp_path, 2, {"__metadata__": torch.ones(1)}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Pages:
    """A reader of these pages."""

    def __init__(self, *pages: Page) -> None:
        self._pages = pages

    def pages(self, store: int, key: str) -> Any:
        return self._pages


def tensors(table: Table, *pages: Page, states: bool = False) -> dict[str, list[Any]]:
    reader: Any = Pages(*pages)
    made = ExportedTable(reader, 0, "t", table, states)
    found = {}
    for header, part in zip(made.headers(), made.contents(), strict=True):
        dtype = getattr(torch, header.dtype)
        flat = torch.frombuffer(bytearray(part), dtype=dtype) if len(part) else torch.empty(0, dtype=dtype)
        found[header.name] = flat.view(tuple(header.shape)).tolist()
    return found


def page(ids: list[int]) -> Page:
    rows = np.array(ids, np.float32)[:, None]
    return Page(np.array(ids, np.int64), rows, {"seen": np.ones(len(ids), np.int64), "state.sum": rows + 0.5})


def test_rows_of_a_table_that_grows_come_with_their_ids() -> None:
    found = tensors(Table(dim=1), page([9, 2]), page([5]), states=True)
    assert found == {"t": [[2], [5], [9]], "t.ids": [2, 5, 9], "t.sum": [[2.5], [5.5], [9.5]]}


def test_a_table_with_a_shape_is_whole() -> None:
    assert tensors(Table(shape=(4, 1), init="constant", scale=7.0), page([2])) == {"t": [[7], [7], [2], [7]]}
    half = Table(shape=(4, 1), init="constant", scale=7.0, dtype="bfloat16")
    of_half = page([2])._replace(rows=narrowed(np.array([[2.0]], np.float32), half.dtype))
    assert tensors(half, of_half) == {"t": [[7], [7], [2], [7]]}


def test_no_rows_are_empty_tensors() -> None:
    assert tensors(Table(dim=1), states=True) == {"t": [], "t.ids": []}


def test_a_name_says_what_its_tensor_is() -> None:
    reader: Any = Pages(page([1]))
    table = ExportedTable(reader, 0, "t", Table(dim=1), True)
    named = [("t", "table 't'"), ("t.ids", "the ids of table 't'"), ("t.sum", "state 'sum' of table 't'")]
    assert table.names() == named
    with pytest.raises(CheckpointError, match=r"array 't.ids' and the ids of table 't' would both have the name"):
        require_names("out is not written", [("t.ids", "array 't.ids'"), *named])


# ---- read_checkpoint


def test_a_program_has_the_newest_checkpoint_by_name(tmp_path: Path) -> None:
    arrays = {"w": torch.rand(1000), "b": torch.tensor(1.5)}
    write(tmp_path, 1, {"w": torch.zeros(3)})
    folder = write(tmp_path, 2, arrays, {("w", "momentum_buffer"): arrays["w"] + 1})
    write(tmp_path, 3, {"w": torch.zeros(3)}, whole=False)
    for path in (tmp_path, folder, str(folder)):
        values: Any = kv.read_checkpoint(path)
        assert values.keys() == arrays.keys()
        assert all(torch.equal(values[name], arrays[name]) for name in arrays)
    states: Any = kv.read_checkpoint(tmp_path, states=True)
    assert torch.equal(states["w.momentum_buffer"], arrays["w"] + 1)
    export(folder, tmp_path / "plain.safetensors")
    plain: Any = kv.read_checkpoint(tmp_path / "plain.safetensors")
    assert all(torch.equal(plain[name], arrays[name]) for name in arrays)


def test_what_is_read_is_mapped_and_writing_to_it_changes_no_file(tmp_path: Path) -> None:
    write(tmp_path, 1, {"w": torch.ones(1000)}, servers=1)
    mapped = tmp_path / "checkpoint-00000001" / "store-0.server-0.safetensors"
    for path in (tmp_path, mapped):
        before = mapped.read_bytes()
        (value,) = kv.read_checkpoint(path).values()
        assert isinstance(value, torch.Tensor)
        assert str(mapped) in Path("/proc/self/maps").read_text()
        value.add_(1)
        assert (value == 2).all()
        assert mapped.read_bytes() == before
        del value


def test_tables_are_rows_with_their_ids(tmp_path: Path) -> None:
    reader: Any = Pages(page([9, 2]))
    made: Any = ExportedTable(reader, 0, "t", Table(dim=1), True).values()
    assert made.keys() == {"t", "t.sum"}
    assert (made["t"].ids.tolist(), made["t"].rows.tolist(), made["t"].shape) == ([2, 9], [[2], [9]], None)
    assert made["t.sum"].tolist() == [[2.5], [9.5]]
    whole: Any = ExportedTable(reader, 0, "t", Table(shape=(10, 1)), True).values()
    assert whole["t"].sum() == 11
    assert whole["t.ids"].tolist() == [2, 9]


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    (tmp_path / "pickle").write_bytes(b"\x80\x04].")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("none", "missing or unreadable"),
        ("", "no checkpoint there"),
        ("text", "missing or damaged"),
        ("pickle", "Pickles are not read"),
        ("pipe", "no plain file"),
    ):
        with pytest.raises(CheckpointError, match=said) as caught:
            kv.read_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    write(tmp_path, 1, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no store 1: it has 1, numbered from 0"):
        kv.read_checkpoint(tmp_path, store=1)


# ---- stateful


ADAM = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3)}},
    "param_groups": [{"lr": 0.1, "betas": (0.8, 0.9), "fused": None, "params": [0, 1]}],
}  # as torch.optim.Adam's state_dict is


def test_the_state_of_a_torch_optimizer_comes_back() -> None:
    state = {"adam": ADAM, "mask": torch.tensor([True, False]), "__tuple__": [1, None, "text"]}
    assert _equal(unpacked(*packed(state, "worker/")), state)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_tensors_are_copied() -> None:
    tensor = torch.ones(2)
    tensors, _ = packed({"a": tensor})
    tensor.zero_()
    assert tensors["0"].tolist() == [1, 1]


@pytest.mark.parametrize("state", [{"f": print}, [object()], {"c": torch.zeros(1, dtype=torch.complex64)}])
def test_what_is_not_plain_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="checkpoint"):
        packed(state)


@pytest.mark.parametrize("text", ["{", '{"__tensor__": "9", "bool": false}', '{"__pairs__": [1]}'])
def test_damage_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        unpacked({}, text)


def test_scalars_of_numpy_are_numbers() -> None:
    state = {"last": [np.float32(0.5), np.int64(3)], "best": np.array(0.25), "on": np.True_}
    assert unpacked(*packed(state)) == {"last": [0.5, 3], "best": 0.25, "on": True}
