from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written import contents, headers

from kvstore.checkpoint.tensors import TensorHeader, opened, write_tensors
from kvstore.errors import CheckpointError
from kvstore.manifests import PIECE, record_of
from kvstore.spec import ITEMSIZE


def test_safetensors_reads_what_was_written_of_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {f"{dtype}": torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)) for dtype in ITEMSIZE}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.rand(PIECE // 4 + 3)}
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, headers(tensors), contents(tensors), {"number": "3"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in loaded
    )
    assert record == (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert record_of(path) == record
    with opened(path) as file:
        assert file.metadata() == {"number": "3"}


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> object:
        yield b"\0" * 4
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "a", headers({"x": torch.zeros(2)}), broken(), {})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.*missing"):
        record_of(tmp_path / "gone")
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"bad.*damaged"), opened(tmp_path / "bad"):
        pass


def test_two_tensors_of_one_name_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    headers = [TensorHeader("a", "float32", [1])] * 2
    with pytest.raises(CheckpointError, match="would both have the name 'a'"):
        write_tensors(tmp_path / "out", headers, [b"0000", b"1111"], {})
    assert not list(tmp_path.iterdir())
