from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from written import write

from kvstore.checkpoint.command import ExportedTable, export, main
from kvstore.checkpoint.tensors import require_names
from kvstore.errors import CheckpointError
from kvstore.rows.frozen_rows import Page
from kvstore.table import Table


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


def test_no_rows_are_empty_tensors() -> None:
    assert tensors(Table(dim=1), states=True) == {"t": [], "t.ids": []}


def test_a_name_says_what_its_tensor_is() -> None:
    reader: Any = Pages(page([1]))
    table = ExportedTable(reader, 0, "t", Table(dim=1), True)
    named = [("t", "table 't'"), ("t.ids", "the ids of table 't'"), ("t.sum", "state 'sum' of table 't'")]
    assert table.names() == named
    with pytest.raises(CheckpointError, match=r"array 't.ids' and the ids of table 't' would both have the name"):
        require_names(Path("out"), [("t.ids", "array 't.ids'"), *named])
