from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written import write

from kvstore.checkpoint.command import export
from kvstore.errors import CheckpointError


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
