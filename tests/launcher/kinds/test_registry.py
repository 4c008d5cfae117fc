"""Which options each launcher takes."""

from __future__ import annotations

from typing import Any

import pytest
from every_option import VALUES

from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job, option
from launcher.kinds.registry import KINDS, find
from launcher.launch import main


def job(**cluster: Any) -> Job:
    return Job(1, 1, ("x",), cluster=Cluster(**cluster))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_takes_its_own_options_and_no_others(kind: str) -> None:
    assert KINDS[kind].takes <= set(VALUES)
    mine = {field: value for field, value in VALUES.items() if field in KINDS[kind].takes}
    assert find(kind, job(**mine)) is KINDS[kind]
    for field in set(VALUES) - KINDS[kind].takes:
        with pytest.raises(LaunchError) as caught:
            find(kind, job(**mine, **{field: VALUES[field]}))
        assert str(caught.value).startswith(f"--launcher {kind} does not take {option(field)}; leave it out")
        for other in KINDS:
            assert (f" {other}" in str(caught.value).partition("that take it:")[2]) == (field in KINDS[other].takes)


def test_no_option_is_for_nobody() -> None:
    assert set().union(*(kind.takes for kind in KINDS.values())) == set(VALUES)


@pytest.mark.parametrize(
    ("kind", "program"),
    [("mpi", "mpirun"), ("slurm", "sbatch"), ("sge", "qsub"), ("yarn", "yarn"), ("kubernetes", "kubectl")],
)
def test_a_manager_that_is_not_here_is_named(
    kind: str, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    image = ["--image", "i"] if kind == "kubernetes" else []
    assert main(["-n", "1", "--launcher", kind, *image, "x"]) == 127
    assert program in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
