"""Optimizer states in a file, and cut over servers: what is written is read, and a damaged file says so."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import ODD, changed, error_of, fields
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvstore.errors import UsageError
from kvstore.optim.optimizer import describe
from kvstore.optim.states_file import (
    FORMAT,
    read,
    read_keys,
    read_note,
    read_residuals,
    require_keys,
    require_optimizer,
    write,
)
from kvstore.optim.updater import Updater
from kvstore.spec import Key, Spec

STATES = {
    ("w", "momentum_buffer"): torch.arange(6.0).view(2, 3),
    ("w", "step"): torch.tensor(3.0),
    ("a/b 重み", "momentum_buffer"): torch.ones(2, dtype=torch.float64),
    ("h", "master"): torch.zeros(0, 2),
}


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[where], two[where]) and one[where].dtype == two[where].dtype for where in one
    )


@pytest.mark.parametrize("states", [STATES, {(7, "sum"): torch.ones(3), (-1, "sum"): torch.ones(1)}, {}])
def test_what_is_written_is_read(states: Any, tmp_path: Path) -> None:
    write(tmp_path / "s", "adam", states)
    name, found = read(tmp_path / "s")
    assert name == "adam"
    assert same(found, states)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_views_of_one_memory_can_be_written(tmp_path: Path) -> None:
    both = torch.arange(6.0)
    states = {("w", "a"): both[:3], ("w", "b"): both[1:4], ("w", "c"): both.view(2, 3).t()}
    write(tmp_path / "s", "adam", states)
    assert same(read(tmp_path / "s")[1], states)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_tensors: Any, name: str, _metadata: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    path = tmp_path / "s"
    write(path, "adam", {("w", "step"): torch.tensor(1.0)})
    monkeypatch.setattr("kvstore.optim.states_file.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write(path, "adam", {("w", "step"): torch.tensor(2.0)})
    assert read(path)[1]["w", "step"].item() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        read(tmp_path / "nowhere")


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_no_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "s"
    write(path, "adam", STATES)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    where = data.draw(st.integers(0, header - 1))
    cut_off = data.draw(st.booleans())
    path.write_bytes(
        good[:where]
        if cut_off
        else good[:where] + bytes([good[where] ^ 1 << data.draw(st.integers(0, 7))]) + good[where + 1 :]
    )
    try:
        name, states = read(path)
    except UsageError:
        return
    assert not cut_off
    assert isinstance(name, str)
    assert all(isinstance(value, torch.Tensor) for value in states.values())


@pytest.mark.parametrize(
    ("tensors", "metadata", "text"),
    [
        ({}, None, "is not a file of optimizer states; pass one that save_optimizer_states wrote"),
        ({}, {"format": "pt"}, "is not a file of optimizer states; pass one that save_optimizer_states wrote"),
        ({}, {"format": FORMAT}, "damaged"),
        ({}, {"format": FORMAT, "keys": "[]"}, "damaged"),
        ({}, {"format": FORMAT, "keys": "[", "optimizer": "adam"}, "damaged"),
        ({}, {"format": FORMAT, "keys": "3", "optimizer": "adam"}, "damaged"),
        ({}, {"format": FORMAT, "keys": "[1.5]", "optimizer": "adam"}, "a key is"),
        ({"0/sum": torch.ones(1)}, {"format": FORMAT, "keys": "[]", "optimizer": "adam"}, "damaged"),
        ({}, {"format": FORMAT, "keys": "[" * 100_000, "optimizer": "adam"}, "damaged"),
        ({"-1/sum": torch.ones(1)}, {"format": FORMAT, "keys": "[1]", "optimizer": "adam"}, "damaged"),
        ({"sum": torch.ones(1)}, {"format": FORMAT, "keys": "[1]", "optimizer": "adam"}, "damaged"),
        ({"0/sum": torch.ones(1, dtype=torch.bool)}, {"format": FORMAT, "keys": "[1]", "optimizer": "a"}, "damaged"),
    ],
)
def test_a_file_of_another_kind(tensors: Any, metadata: Any, text: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "s", metadata)
    with pytest.raises(UsageError, match=text):
        read(tmp_path / "s")


@pytest.mark.parametrize(
    ("content", "called"),
    [
        (pickle.dumps({0: None}), "a pickle, as MXNet's .states are"),
        (pickle.dumps({0: None}, 0), "a pickle, as MXNet's .states are"),
        (b"\x12\x01" + bytes(14) + b"\x01", "a file of MXNet's arrays"),
        (b"PK\x03\x04", "an archive of torch.save"),
        (b"\x80\x02" + bytes(6) + b'{"x', "damaged"),  # safetensors with a header of 640 bytes, cut off
    ],
)
def test_a_file_of_another_library_is_called_what_it_is(content: bytes, called: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(content)
    for read_it in (read, read_residuals, read_note, read_keys):
        with pytest.raises(UsageError, match=f"s is {called}"):
            read_it(tmp_path / "s")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s")
    for read_it in (read, read_residuals, read_note, read_keys):
        with pytest.raises(UsageError, match="s: damaged: it is no plain file"):
            read_it(tmp_path / "s")


@pytest.mark.parametrize("found", ["[1]", '{"rank": 1e999, "plain": {}}', '{"rank": 0, "plain": 5}', "[" * 100_000])
def test_damaged_residuals(found: str, tmp_path: Path) -> None:
    save_file({}, tmp_path / "s", {"format": FORMAT, "keys": "[]", "optimizer": "sgd", "residuals": found})
    with pytest.raises(UsageError, match="damaged"):
        read_residuals(tmp_path / "s")


@pytest.mark.parametrize("shape", [[2**63, 0], [2**62, 4], [1] * 100])
def test_shapes_that_cannot_be(shape: list[int], tmp_path: Path) -> None:
    about = {"format": FORMAT, "keys": '["a"]', "optimizer": "sgd"}
    size = 4 * (0 not in shape)
    header = json.dumps({"__metadata__": about, "0/x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}})
    (tmp_path / "s").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(size))
    with pytest.raises(UsageError, match=r"damaged|cannot be stored"):
        read(tmp_path / "s")


def test_a_file_of_another_optimizer(tmp_path: Path) -> None:
    require_optimizer("adam", "adam", "s")
    with pytest.raises(UsageError, match="s holds the states of adam, but the optimizer is sgd"):
        require_optimizer("adam", "sgd", "s")


def test_states_of_keys_that_are_not_there() -> None:
    specs: dict[Key, Spec] = {"w": Spec((2, 3), "float32")}
    require_keys({("w", "sum"): torch.ones(2, 3), ("w", "step"): torch.tensor(1.0)}, specs, "s")
    with pytest.raises(UsageError, match="s holds state of key 'v', which has not been initialized"):
        require_keys({("v", "sum"): torch.ones(2, 3)}, specs, "s")


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2,), (2, 4), (1, 1, 1), (1,)])
def test_states_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"s holds sum of shape \[.*\] for key 'w', which is float32\[2, 3\]"):
        require_keys({("w", "sum"): torch.ones(shape)}, {"w": Spec((2, 3), "float32")}, "s")


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (5,), (1, 1)])
@pytest.mark.parametrize("name", ["adafactor", "adam", "adagrad", "asgd", "rprop"])
def test_what_an_optimizer_saves_it_may_load(name: str, shape: tuple[int, ...]) -> None:
    updater, weight = Updater(describe(name, {})), torch.ones(shape)
    updater.update([("w", weight, torch.ones(shape))])
    require_keys(updater.states.of(["w"]), {"w": Spec(shape, "float32")}, "s")


def test_the_metadata_is_json(tmp_path: Path) -> None:
    write(tmp_path / "s", "adam", STATES)
    header = (tmp_path / "s").read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert json.loads(metadata["keys"]) == ["w", "a/b 重み", "h"]


def test_each_field_damaged_is_refused_by_name_or_read(tmp_path: Path) -> None:
    path = tmp_path / "states"
    good = {
        "format": FORMAT,
        "optimizer": "sgd",
        "keys": ["w", 3],
        "residuals": {"rank": 0, "plain": {"type": "2bit"}},
        "note": "{}",
    }
    texts = ("format", "optimizer", "note")
    tensors = {"0/momentum_buffer": torch.ones(2), "1/step": torch.tensor(1.0), "residual/w": torch.ones(2)}
    for way in fields(good):
        for change in ODD if way else []:
            damaged = changed(good, way, change)
            metadata = {
                key: value if key in texts and type(value) is str else json.dumps(value)
                for key, value in damaged.items()
            }
            save_file(tensors, path, metadata)
            for call in (read, read_residuals, read_note, read_keys):
                said = error_of(lambda call=call: call(path))
                assert said is None or str(path) in said, (way, metadata)
    metadata = {key: value if key in texts else json.dumps(value) for key, value in good.items()}
    for name in ("9/step", "x/step", "step", "residual/", "-1/step", "0/", ""):
        save_file({**tensors, name: torch.ones(1)}, path, metadata)
        for call in (read, read_residuals, read_note, read_keys):
            error_of(lambda call=call: call(path))
