"""Every option of the command line."""

from __future__ import annotations

from typing import Any

import pytest
from every_option import VALUES, spelt

from launcher.cli import parse
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.kinds.registry import KINDS, find
from launcher.launch import main


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
        (["--no-host-aggregation"], {"host_aggregation": False}),
        (["--env-worker", "KVSTORE_AGGREGATE:0"], {"host_aggregation": False}),
        (["--env-server", "KVSTORE_AGGREGATE:off"], {"host_aggregation": False}),
        (["--env-worker", "KVSTORE_AGGREGATE:1"], {}),
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


def test_aggregators_are_switched_off_in_the_environment_too(capsys: pytest.CaptureFixture[str]) -> None:
    off = parse(["-n", "1", "x"], {"KVSTORE_AGGREGATE": "0"})
    assert off.job.cluster == Cluster(host_aggregation=False)
    for kind in KINDS:
        assert find(kind, off.job) is KINDS[kind], "which may have none in any case"
    with pytest.raises(LaunchError, match="KVSTORE_AGGREGATE='maybe' is not valid"):
        parse(["-n", "1", "x"], {"KVSTORE_AGGREGATE": "maybe"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placement", "random"], "invalid choice: 'random'"),
        (["--worker-cores", "-1"], "'-1' is not a number from 0 to 4096"),
        (["--worker-cores=4097"], "'4097' is not a number"),
        (["--worker-cores", "0" * 9 + "9999999"], "is not a number"),
        (["--gpus-per-worker", "²"], "is not a number"),
        (["--gpus-per-worker", "9" * 5000], "is not a number"),
        (["--mem", "4gb"], "'4gb' is not a size; valid: a number with m or g"),
        (["--mem", "0m"], "is not a size"),
        (["--server-memory=-4g"], "is not a size"),
        (["--job-name", "a" * 41], "is not a job name; valid: up to 40 lowercase letters"),
        (["--job-name", "a-"], "is not a job name; valid: up to 40 lowercase letters"),
        (["--job-name", "-x"], "--job-name"),
        (["--encryption"], "there is no option --encryption"),
        (["--sync"], "there is no option --sync"),
        (["--checkpointdir=x"], "options of the command go after the command; did you mean '--checkpoint-dir'?"),
        (["--launcher", "kubernetes", "--hostfile", "h"], "(launchers that take it: ssh, mpi)"),
        (["--launcher", "sge", "--no-encryption", "--image", "i"], "(launchers that take it: kubernetes)"),
        (["--image", "i", "-H", "h"], "--launcher ssh does not take --image"),
        (["--no-encryption"], "--launcher local does not take --no-encryption"),
        (["--launcher", "ssh"], "--launcher ssh needs a hostfile: -H FILE"),
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
