"""Which options each kind of cluster takes, and what the command line makes of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from launcher.cli import parse
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster, option
from launcher.job.description import Job
from launcher.kinds.registry import KINDS, find
from launcher.launch import main

# A value for each, that is not its default.
VALUES: dict[str, Any] = {
    "hostfile": "hosts",
    "server_hosts": "others",
    "placement": "round-robin",
    "sync_dst_dir": "/d",
    "sync_exclude": ("*.pt",),
    "sync_gitignore": True,
    "ssh_config": "cfg",
    "ssh_option": ("A=b", "C=d"),
    "python": "/py",
    "host_ip": "10.0.0.1",
    "interface": "eth0",
    "encryption": False,
    "job_name": "mnist",
    "queue": "gpu",
    "time": "2:00:00",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "4g",
    "server_memory": "500m",
    "gpus_per_worker": 2,
    "cluster_option": ("--exclusive",),
    "image": "me/mine",
    "namespace": "team",
    "yarn_jar": "ds.jar",
}


def job(**cluster: Any) -> Job:
    return Job(1, 1, ("x",), cluster=Cluster(**cluster))


def spelt(field: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option(field)]
    return [f"{option(field)}={one}" for one in (value if isinstance(value, tuple) else (value,))]


def test_what_is_given_is_what_is_not_at_its_default() -> None:
    assert {field.name for field in fields(Cluster)} == set(VALUES)
    assert Cluster().given() == []
    assert Cluster(**VALUES).given() == list(VALUES)
    for field, value in VALUES.items():
        assert Cluster(**{field: value}).given() == [field]


@pytest.mark.parametrize("field", VALUES)
def test_every_field_is_an_option_of_that_name(field: str) -> None:
    value = VALUES[field]
    parsed = parse(["-n", "1", *spelt(field, value), "x"], {}).job.cluster
    assert parsed == Cluster(**{field: value})
    assert parsed.given() == [field]


def test_all_options_at_once() -> None:
    words = [word for field, value in VALUES.items() for word in spelt(field, value)]
    assert parse(["-n", "1", *words, "x"], {}).job.cluster == Cluster(**VALUES)
    assert parse(["-n", "1", "x"], {}).job.cluster == Cluster()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_takes_its_own_options_and_no_others(kind: str) -> None:
    assert KINDS[kind].takes <= set(VALUES)
    mine = {field: value for field, value in VALUES.items() if field in KINDS[kind].takes}
    assert find(kind, job(**mine)) is KINDS[kind]
    for field in set(VALUES) - KINDS[kind].takes:
        with pytest.raises(LaunchError) as caught:
            find(kind, job(**mine, **{field: VALUES[field]}))
        assert str(caught.value).startswith(f"--launcher {kind} takes no {option(field)}; leave it out")
        for other in KINDS:
            assert (f" {other}" in str(caught.value).partition("that do:")[2]) == (field in KINDS[other].takes)


def test_no_option_is_for_nobody() -> None:
    assert set().union(*(kind.takes for kind in KINDS.values())) == set(VALUES)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-H", "hosts"], {"hostfile": "hosts"}),
        (["--mem", "4g"], {"worker_memory": "4g"}),
        (["--worker-memory", "500"], {"worker_memory": "500m"}),
        (["--server-memory", "4G"], {"server_memory": "4g"}),
        (["--worker-cores", "0000000008"], {"worker_cores": 8}),
        (["--worker-cores", "0"], {}),
        (["--no-encryption"], {"encryption": False}),
        (["--job-name", "a" * 40], {"job_name": "a" * 40}),
        (["--cluster-option", "-v", "--cluster-option=--x"], None),
        (["--cluster-option=-v", "--cluster-option=--x=y z"], {"cluster_option": ("-v", "--x=y z")}),
    ],
)
def test_other_ways_to_say_it(words: list[str], expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(LaunchError, match="--cluster-option: expected one argument"):
            parse(["-n", "1", *words, "x"], {})
    else:
        assert parse(["-n", "1", *words, "x"], {}).job.cluster == Cluster(**expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placement", "random"], "invalid choice: 'random'"),
        (["--worker-cores", "-1"], "'-1' is not a number from 0 to 1024"),
        (["--worker-cores=1025"], "'1025' is not a number"),
        (["--worker-cores", "0" * 9 + "9999999"], "is not a number"),
        (["--gpus-per-worker", "²"], "is not a number"),
        (["--gpus-per-worker", "9" * 5000], "is not a number"),
        (["--mem", "4gb"], "'4gb' is not a size such as 500m or 4g"),
        (["--mem", "0m"], "is not a size"),
        (["--server-memory=-4g"], "is not a size"),
        (["--job-name", "a" * 41], "must be up to 40 small letters"),
        (["--job-name", "a-"], "must be up to 40 small letters"),
        (["--job-name", "-x"], "--job-name"),
        (["--encryption"], "no such option: --encryption"),
        (["--sync"], "no such option: --sync"),
        (["--launcher", "kubernetes", "--hostfile", "h"], "(launchers that do: ssh, mpi)"),
        (["--launcher", "sge", "--no-encryption", "--image", "i"], "(launchers that do: kubernetes)"),
        (["--image", "i", "-H", "h"], "--launcher ssh takes no --image"),
        (["--no-encryption"], "--launcher local takes no --no-encryption"),
        (["--launcher", "ssh"], "--launcher ssh needs the hosts to run on: -H FILE"),
        (["-H", "/nowhere/hosts"], "cannot read the hostfile /nowhere/hosts"),
        (["--launcher", "kubernetes"], "--launcher kubernetes needs --image"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_makes_no_sense_is_an_error(
    dry: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*dry, "-n", "1", *words, "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("launch.py: ")
    assert message in captured.err


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
