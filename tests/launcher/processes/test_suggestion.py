from __future__ import annotations

from pathlib import Path

import pytest

from launcher.processes.suggestion import suggestion


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with a few programs, and a file that cannot be executed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, mode in (("python3.11", 0o755), ("torchrun", 0o755), ("pyhtom", 0o644)):
        (folder / name).touch(mode)
    return f"/no/such/folder:{folder}"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("pyhton", "train.py"), "python train.py"),
        (("pyton3", "train.py"), "python3 train.py"),
        (("torchrnu", "a b.py", "--lr"), "torchrun 'a b.py' --lr"),
        (("no-such-command",), ""),
        (("/usr/bin/pyhton", "train.py"), ""),  # a path says where to look
        (("pyhton train.py", "--lr"), ""),
        (("missing.py",), ""),
    ],
)
def test_misspelt_programs(programs: str, argv: tuple[str, ...], meant: str) -> None:
    assert suggestion(argv, programs) == meant


def test_a_script_needs_python(programs: str, tmp_path: Path) -> None:
    (tmp_path / "ok.py").touch()
    assert suggestion(("ok.py", "--lr", "0.1"), programs, str(tmp_path)) == "python ok.py --lr 0.1"
    assert suggestion(("./ok.py",), programs, str(tmp_path)) == "python ./ok.py"
    assert suggestion((str(tmp_path / "ok.py"),), programs) == f"python {tmp_path}/ok.py"


def test_a_long_command_is_cut_between_words(programs: str) -> None:
    assert suggestion(("pyhton", "train.py", *["--word"] * 99), programs).endswith(" --word ...")
