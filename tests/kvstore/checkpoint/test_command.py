from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from written import write

from kvstore.checkpoint.command import main


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
