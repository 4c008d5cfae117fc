from __future__ import annotations

from pathlib import Path

from kvstore.job.our_module import ROOT
from kvstore.job.shadows import shadows


def test_a_file_and_a_package_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "workers.py").touch()
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").touch()
    assert [str(shadow) for shadow in shadows([str(tmp_path)])] == [
        f"`import kvstore` takes {tmp_path}/kvstore/__init__.py, which hides the package {ROOT}/kvstore; "
        "rename the file, unless that is meant",
        f"`import workers` takes {tmp_path}/workers.py, which hides the package {ROOT}/workers; "
        "rename the file, unless that is meant",
    ]


def test_what_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()  # without __init__.py: an installed package goes first
    assert shadows([str(tmp_path), "/nowhere", ROOT]) == []
    (tmp_path / "kvstore.py").touch()
    assert shadows([ROOT, str(tmp_path)]) == []


def test_a_link_to_ours_is_ours(tmp_path: Path) -> None:
    (tmp_path / "workers").symlink_to(Path(ROOT, "workers"))
    assert shadows([str(tmp_path)]) == []
