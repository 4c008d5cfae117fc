"""What users get: the sdist and the wheel that `make dist` makes, installed where no clone is at hand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvstore

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"kvstore", "launcher", "servers", "workers"}
FILES = "https://example.org/kvstore/blob/v1"  # where the project's files are, as the page on PyPI has it
NEEDED = ("cloudpickle", "msgpack", "numpy", "pyzmq", "safetensors", "torch")

pytestmark = pytest.mark.long


def run(command: Sequence[str | Path], folder: Path, path: Path | None = None) -> str:
    """Run a command that must succeed, as a user would who has nothing of this clone in the environment."""
    env = {name: os.environ[name] for name in ("HOME", "OMP_NUM_THREADS") if name in os.environ}
    env["PATH"] = os.pathsep.join([*([str(path)] if path else []), os.environ["PATH"]])
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def make(folder: Path) -> dict[str, bytes]:
    run(["env", f"LINKS={FILES}/", ROOT / "tools/dist.sh", folder, sys.executable], ROOT)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    make(folder)
    return folder


def tracked(*names: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def closure(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or ())
            waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def environment(folder: Path, *names: str) -> Path:
    """Make an environment with `names` and what they need, as links to this one's files. Return its folder of programs.

    An installation of torch would take longer than all tests of this file.
    """
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in closure(names):
        distribution = metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():  # several distributions may share a folder
                (site / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    return folder / "bin"


def install(programs: Path, *what: str | Path) -> None:
    """Let pip install `what`, with nothing but what is there: a requirement that is missing is an error."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", programs / "python", "install", "--no-index"]
    run([*pip, "--no-build-isolation", *what], programs)


@pytest.mark.release
def test_the_same_files_give_the_same_bytes_which_twine_accepts(dist, tmp_path):
    before = os.umask(0o077)
    try:
        again = make(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: path.read_bytes() for path in dist.iterdir()} == again
    said = run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *dist.iterdir()], dist)
    assert said.count("PASSED") == len(again) == 2
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        description = wheel.read(f"{Path(wheel.filename).name.removesuffix('-py3-none-any.whl')}.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]*)\)", description.decode())
    assert {link for link in links if not link.startswith("https://")} == set()
    assert f"{FILES}/docs/launching.md#operating-systems" in links
    assert names == set(tracked(*PACKAGES))
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


@pytest.mark.release
def test_the_wheel_runs_an_example_of_the_sdist_where_there_is_no_clone(dist, tmp_path):
    programs = environment(tmp_path / "environment", *NEEDED)
    install(programs, *dist.glob("*.whl"))
    assert run([programs / "launch.py", "--version"], tmp_path) == f"launch.py of torch-kvstore {kvstore.__version__}\n"
    with tarfile.open(*dist.glob("*.tar.gz")) as sdist:
        sdist.extractall(tmp_path, [member for member in sdist if "/examples/" in member.name], filter="data")
    (examples,) = tmp_path.glob("*/examples")
    training = "python train_cifar10.py --dataset digits --num-examples 64 --batch-size 32 --num-epochs 1"
    said = run(["launch.py", "-n", "2", "-s", "2", "--launcher", "local", training], examples, programs)
    assert "Validation-accuracy=" in said


@pytest.mark.release
def test_type_checkers_find_the_types_of_an_editable_install(tmp_path):
    clone = tmp_path / "clone"
    for name in tracked("setup.cfg", "pyproject.toml", "README.md", "LICENSE", *PACKAGES):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    programs = environment(tmp_path / "environment", "setuptools")
    install(programs, "--no-deps", "--editable", clone)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", programs / "python", "--follow-imports=skip"]
    run([*mypy, "-c", f"import {', '.join(sorted(PACKAGES))}"], tmp_path)
