from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from written import write

from kvstore.checkpoint.manifest import MANIFEST
from kvstore.checkpoint.reader import verify
from kvstore.errors import CheckpointError

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
