"""Every option of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_option import VALUES, spelt

from launcher.cli import (
    add_checkpoints,
    add_failures,
    add_hosts,
    add_network,
    add_output,
    add_readers,
    add_resources,
    checkpoint_variables,
    count,
    memory,
    name,
    number,
    output_options,
    parse,
    variable,
)
from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job, OutputOptions, option
from launcher.kinds.registry import KINDS, find
from launcher.launch import main


def given(add: Callable[[Any], None], *words: str) -> argparse.Namespace:
    """What these words say.

    Raises:
        ArgumentError: they are not valid.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add(parser.add_argument_group("options"))
    return parser.parse_args(words)


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


def test_they_are_variables_of_servers_and_workers() -> None:
    options = given(add_checkpoints, "--checkpoint-dir", "run", "--checkpoint-every", "500r", "--checkpoint-keep", "2")
    assert checkpoint_variables(options) == {
        "KVSTORE_CHECKPOINT_DIR": str(Path("run").absolute()),
        "KVSTORE_CHECKPOINT_EVERY": "500r",
        "KVSTORE_CHECKPOINT_KEEP": "2",
    }
    assert checkpoint_variables(given(add_checkpoints, "--resume", "/old")) == {"KVSTORE_CHECKPOINT_RESUME": "/old"}
    assert checkpoint_variables(given(add_checkpoints)) == {}


def test_an_interval_that_is_none() -> None:
    with pytest.raises(argparse.ArgumentError, match="'10' is not valid; valid: a number of rounds such as 500r"):
        given(add_checkpoints, "--checkpoint-every", "10")


def test_failures() -> None:
    options = given(add_failures, "--replicas", "1", "--restarts", "0", "--inject=a", "--inject", "b")
    assert (options.replicas, options.restarts, options.inject) == (1, 0, ["a", "b"])
    assert (given(add_failures).replicas, given(add_failures).restarts) == (None, None), "others decide"
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 2"):
        given(add_failures, "--replicas", "2")


def test_hosts() -> None:
    options = given(add_hosts, "-H", "hosts", "--ssh-option", "A=b", "--ssh-option=C=d", "--sync-gitignore")
    assert (options.hostfile, options.ssh_option, options.sync_gitignore) == ("hosts", ["A=b", "C=d"], True)
    assert given(add_hosts).placement == "fill"
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'random'"):
        given(add_hosts, "--placement", "random")


def test_links_are_encrypted_unless_it_is_said() -> None:
    assert given(add_network).encryption is given(add_network).host_aggregation is True
    options = given(add_network, "--no-encryption", "--no-host-aggregation", "--host-ip", "10.0.0.1")
    assert (options.encryption, options.host_aggregation, options.host_ip) == (False, False, "10.0.0.1")


@pytest.mark.parametrize(
    ("words", "port", "command"),
    [
        (["--dashboard", "python", "train.py"], 0, ("python", "train.py")),
        (["--dashboard", "8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard=8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard", "-s", "1", "./train"], 0, ("./train",)),
        (["python", "train.py", "--dashboard"], None, ("python", "train.py", "--dashboard")),
        (["python", "train.py", "--dashboard", "x"], None, ("python", "train.py", "--dashboard", "x")),
        (["--dashboard", "--", "python", "--dashboard"], 0, ("python", "--dashboard")),
    ],
)
def test_a_dashboard_has_a_port_or_any(words: list[str], port: int | None, command: tuple[str, ...]) -> None:
    job = parse(["-n", "1", *words], {}).job
    assert (job.cluster.dashboard, job.command) == (port, command)


@pytest.mark.parametrize("port", ["0", "65536", "x", "", "999999999"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="not a port"):
        parse(["-n", "1", f"--dashboard={port}", "./train"], {})


def test_the_file_of_the_token_is_absolute() -> None:
    job = parse(["-n", "1", "--dashboard-token-file", "t", "./train"], {}).job
    assert str(job.cluster.dashboard_token_file).startswith("/")
    assert parse(["-n", "1", "./train"], {}).job.cluster.dashboard_token_file is None


@pytest.mark.parametrize(
    ("given", "name", "rounds"),
    [
        ("t.json", "t.json", "1-100"),
        ("t.json:20", "t.json", "1-20"),
        ("t.json:500-600", "t.json", "500-600"),
        ("a:b.json", "a:b.json", "1-100"),
        ("a:b.json:7", "a:b.json", "1-7"),
    ],
)
def test_a_trace_is_a_file_and_perhaps_its_rounds(given: str, name: str, rounds: str) -> None:
    job = parse(["-n", "1", "--trace", given, "./train"], {}).job
    assert job.cluster.trace == f"{Path(name).absolute()}:{rounds}"


@pytest.mark.parametrize(
    ("given", "said"),
    [("t.json:0", "'0' is not valid"), ("t.json:9-8", "'9-8' is not valid"), (":7", "no file"), (".", "directory")],
)
def test_a_trace_without_a_file_or_rounds_is_refused(given: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        parse(["-n", "1", "--trace", given, "./train"], {})


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], OutputOptions()),
        (["--log-dir", "/d", "--log-size", "500K", "--log-files", "1"], OutputOptions("/d", 500 << 10, 1)),
        (["--log-dir", "d"], OutputOptions(str(Path("d").absolute()))),
        (["--show", "none"], OutputOptions(show=(), scroll=True)),
        (["--show=0,2-3"], OutputOptions(show=(0, 2, 3), scroll=True)),
        (["--live", "--show", "all"], OutputOptions(live=True, scroll=True)),
        (["--live", "--log-dir", "/d"], OutputOptions("/d", live=True)),
    ],
)
def test_what_the_options_say(words: list[str], options: OutputOptions) -> None:
    assert output_options(given(add_output, *words)) == options


@pytest.mark.parametrize("text", ["", "16", "0m", "63k", "-1m", "1.5g", "16mb", "9" * 5000 + "k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a size from 64k on; valid: such as 500k, 16m or 1g"):
        given(add_output, f"--log-size={text}")


def test_ranks_that_are_none() -> None:
    with pytest.raises(argparse.ArgumentError, match="argument --show: 'x' is not a rank; valid: all, none, or ranks"):
        given(add_output, "--show", "x")


def test_live_alone_would_lose_lines() -> None:
    with pytest.raises(LaunchError, match="--live shows the last line of each process; say where the others go"):
        output_options(given(add_output, "--live"))


def test_the_file_is_where_launch_py_was_started() -> None:
    options = given(add_readers, "--readers", "job.json")
    assert (options.readers, options.max_readers) == (str(Path("job.json").absolute()), 64)
    assert given(add_readers).readers is None


def test_resources() -> None:
    options = given(
        add_resources, "--mem", "4g", "--server-memory", "500", "--worker-cores", "4", "--job-name", "mnist-2"
    )
    assert (options.worker_memory, options.server_memory, options.worker_cores) == ("4g", "500m", 4)
    assert (options.job_name, given(add_resources).job_name) == ("mnist-2", "kvstore")


@pytest.mark.parametrize("name", ["a" * 41, "a-", "Mnist", "1a", ""])
def test_names_that_a_cluster_does_not_take(name: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a job name; valid: up to 40 lowercase letters"):
        given(add_resources, "--job-name", name)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        *((number, "0", 0), (number, "0000000008", 8), (count, "4096", 4096)),
        *((memory, "500", "500m"), (memory, "4G", "4g"), (memory, "", "")),
        *((variable, "A:x:y= z", ("A", "x:y= z")), (variable, "A:", ("A", "")), (name, "_a1", "_a1")),
    ],
)
def test_what_is_valid(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (number, "-1", "'-1' is not a number from 0 to 4096"),
        (count, "0", "'0' is not a number from 1 to 4096"),
        (count, "4097", "'4097' is not a number"),
        (number, "²", "is not a number"),
        (number, "9" * 5000, "is not a number"),
        (memory, "4gb", "'4gb' is not a size; valid: a number with m or g"),
        (memory, "0m", "is not a size"),
        (variable, "1A:hunter2", "expected NAME:VALUE"),
        (variable, "hunter2", "expected NAME:VALUE"),
        (name, "A=hunter2", "expected a variable's name alone"),
    ],
)
def test_what_is_not(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message) as caught:
        read(text)
    assert "hunter2" not in str(caught.value), "it may be a secret"


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


def test_an_installed_package_may_bring_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from launcher.kinds.kind import Kind\n"
        "KIND = Kind(lambda job, on_failure: job.num_workers, lambda job: 'dry', frozenset({'queue'}))\n"
    )
    (tmp_path / "theirs-1.dist-info").mkdir()
    points = "cloud = theirs:KIND\nodd = theirs:Kind\ngone = theirs.gone:KIND\nlocal = theirs:KIND\n"
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text(f"[kvstore.launchers]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["-n", "7", "--launcher", "cloud", "--queue", "q", "true"]) == 7
    assert main(["-n", "7", "--launcher", "cloud", "--dry-run", "true"]) == 0
    assert capsys.readouterr().out == "dry\n"
    for words, said in (
        (["cloud", "--namespace", "n"], "--launcher cloud does not take --namespace"),
        (["odd"], "--launcher odd: theirs:Kind is a type, not a launcher's Kind"),
        (["gone"], "--launcher gone: cannot import theirs.gone:KIND: ModuleNotFoundError"),
        (["clown"], "invalid choice: 'clown' (choose from 'local', 'ssh'"),
    ):
        assert main(["-n", "1", "--launcher", *words, "true"]) == 2
        assert said in capsys.readouterr().err
    assert find("local", job()) is KINDS["local"]
