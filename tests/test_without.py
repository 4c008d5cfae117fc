"""Where a program is missing, the tests that need it skip, and no others; here without the hosts themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster.missing import need
from without import without

pytestmark = pytest.mark.long

TESTS = Path(__file__).parent
# Each fixture and each place, over hosts that are none: what is asked for comes before.
PROBES = """
import contextlib
from unittest import mock

import pytest
from cluster import hosts, sge, slurm
from sites import KINDS, place


@pytest.fixture(autouse=True, scope="session")
def _no_hosts(tmp_path_factory):
    fake = mock.MagicMock(directory=tmp_path_factory.mktemp("hosts"))
    fake.launcher_env = {}

    @contextlib.contextmanager
    def nothing(*args, **options):
        yield fake

    with (
        mock.patch.object(hosts.Hosts, "up", nothing),
        mock.patch.object(slurm, "slurm", lambda nodes: contextlib.nullcontext(slurm.Slurm({}, fake))),
        mock.patch.object(slurm.Slurm, "clear", lambda self: None),
        mock.patch.object(sge, "sge", lambda nodes: contextlib.nullcontext(sge.Sge({}, fake))),
        mock.patch.object(sge.Sge, "clear", lambda self: None),
    ):
        yield


def test_hosts(hosts):
    pass


def test_mpirun(mpirun):
    pass


def test_slurm(slurm):
    pass


def test_sge(sge):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_place(kind, request, tmp_path):
    with place(kind, request, tmp_path):
        pass
"""
EVERYTHING = {
    *("hosts", "mpirun[openmpi]", "mpirun[mpich]", "slurm", "sge"),
    *(f"place[{kind}]" for kind in ("ssh", "openmpi", "mpich", "slurm", "sge")),
}
# Two at a time, of which neither has to do with the other: each run starts all that does not skip.
NEEDED = {
    ("mpirun.openmpi", "qsub"): {"mpirun[openmpi]", "place[openmpi]", "sge", "place[sge]"},
    ("mpirun.mpich", "sbatch"): {"mpirun[mpich]", "place[mpich]", "slurm", "place[slurm]"},
    ("sshd",): EVERYTHING,
}


def skipped(programs: Sequence[str], directory: Path) -> set[str]:
    """What skips without these programs; nothing fails."""
    path = directory / "test_probes.py"
    path.write_text(PROBES)
    plugins = ["-p", "cluster.fixtures", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words = ["-m", "pytest", "-v", *plugins, "-c", os.devnull, "--rootdir", str(directory), str(path)]
    paths = [str(TESTS), str(TESTS / "launcher"), str(TESTS.parent)]
    done = subprocess.run(
        without(programs, [sys.executable, *words]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = dict(re.findall(r"::test_(\S+) (PASSED|SKIPPED)", done.stdout))
    assert outcomes.keys() == EVERYTHING
    return {name for name, outcome in outcomes.items() if outcome == "SKIPPED"}


def test_what_needs_a_program_skips_without_it_and_nothing_else_does(tmp_path: Path) -> None:
    need("unshare", "mount")
    lacking = skipped([], tmp_path)  # on this machine as it is
    for programs, theirs in NEEDED.items():
        assert skipped(programs, tmp_path) == lacking | theirs, programs


def test_a_program_is_not_found_however_one_looks() -> None:
    need("unshare", "mount", "ip")
    shown = "import shutil; print(shutil.which('ip'), shutil.which('ip', path='/usr/sbin:/sbin:/usr/bin:/bin'))"
    for programs, found in (["ip"], False), ([], True):
        done = subprocess.run(
            without(programs, [sys.executable, "-c", shown]), capture_output=True, text=True, check=True
        )
        assert (done.stdout.split()[1] != "None") == found
    done = subprocess.run(without(["ip"], ["ip", "link"]), capture_output=True, text=True, check=False)
    assert done.returncode in (126, 127)
