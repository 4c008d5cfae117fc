"""The command line: every option, what makes no sense, and the three ways to call it."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any, NoReturn

import pytest
from every_option import VALUES, spelt
from waiting import LONG

import kvstore
import launcher
from launcher import launch
from launcher.cli import parse
from launcher.errors import CANNOT_EXECUTE, NOT_FOUND, USAGE, LaunchError, WorkerFailed
from launcher.job.description import Cluster, Job, OutputOptions, option
from launcher.kinds import local
from launcher.kinds.registry import KINDS, find
from launcher.launch import main

# ---- the command line: every option, what makes no sense, and which launcher takes which option


def job(*argv: str, environ: dict[str, str] | None = None) -> Job:
    return parse(argv, environ or {})[1]


def test_the_readme_line() -> None:
    kind, parsed, dry_run, _ = parse(["-n", "2", "-s", "3", "--launcher", "local", "python train_cifar10.py"], {})
    assert (kind, dry_run) == ("local", False)
    assert (parsed.num_workers, parsed.num_servers, parsed.command) == (2, 3, ("python train_cifar10.py",))


def test_as_many_servers_as_workers() -> None:
    assert job("--num-workers", "3", "x").num_servers == 3
    assert job("--num-workers=3", "--num-servers=1", "x").num_servers == 1


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py", "--lr", "0.1"),
        ("python", "train.py", "-n", "5", "--env", "X", "-h"),
        ("python", "-c", "pass", "--", "x"),
        ("train", "", "a b", "$(id)", "new\nline"),
    ],
)
@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_options_of_the_command_are_its_own(dashes: tuple[str, ...], command: tuple[str, ...]) -> None:
    assert job("-n", "2", *dashes, *command).command == command


def test_options_of_checkpoints_are_variables_of_servers_and_workers() -> None:
    words = ["--checkpoint-dir", "run", "--checkpoint-every", "500r", "--checkpoint-keep", "2", "--resume", "/old"]
    made = job(*words, "-n", "1", "--env-worker", "KVSTORE_CHECKPOINT_KEEP:4", "x")
    assert made.env_server == {
        "KVSTORE_CHECKPOINT_DIR": str(Path("run").absolute()),
        "KVSTORE_CHECKPOINT_EVERY": "500r",
        "KVSTORE_CHECKPOINT_KEEP": "2",
        "KVSTORE_CHECKPOINT_RESUME": "/old",
    }
    assert made.env_worker == {**made.env_server, "KVSTORE_CHECKPOINT_KEEP": "4"}
    assert job("-n", "1", "--resume", "/old", "x").env_server == {"KVSTORE_CHECKPOINT_RESUME": "/old"}
    assert job("-n", "1", "x").env_server == {}


def test_env_options_repeat_and_values_may_hold_anything() -> None:
    parsed = job("-n", "1", "--env-server", "A:1", "--env-worker", "B:x:y= z", "--env-worker", "C:", "--env", "_a1",
                 "x", environ={"_a1": "4"})  # fmt: skip
    assert (parsed.env_server, parsed.env_worker, parsed.env_names) == ({"A": "1"}, {"B": "x:y= z", "C": ""}, ("_a1",))


def test_the_default_launcher() -> None:
    assert parse(["-n", "1", "x"], {})[0] == "local"
    assert parse(["-n", "1", "-H", "hosts", "x"], {})[0] == "ssh"
    kind, parsed, *_ = parse(["-n", "1", "-H", "hosts", "--sync-dst-dir", "/d", "x"], {})
    assert (kind, parsed.cluster.hostfile, parsed.cluster.sync_dst_dir) == ("ssh", "hosts", "/d")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "-n/--num-workers"),
        (["x"], "-n/--num-workers"),
        (["-n", "0", "x"], "'0' is not a number from 1 to 4096"),
        (["-n", "4097", "x"], "'4097' is not a number"),
        (["-n", "two", "x"], "'two' is not a number"),
        (["-n", "²", "x"], "is not a number"),
        (["-n", "9" * 5000, "x"], "is not a number"),
        (["-n", "1", "-s", "0", "x"], "'0' is not a number"),
        (["-n", "1", "-s", "-1", "x"], "is not a number"),
        (["-n", "1"], "command is missing"),
        (["-n", "1", "--"], "command is missing"),
        (["-n", "1", "  "], "command is missing"),
        (["-n", "1", "--launcher", "cloud", "x"], "invalid choice: 'cloud'"),
        (["-n", "1", "--env", "NOT_SET", "x"], "--env NOT_SET: this variable is not set"),
        (["-n", "1", "--lr", "0.1", "x"], "there is no option --lr"),
        (["-n", "1", "--env-worker", "DMLC_ROLE:x", "y"], "--env-worker cannot set DMLC_ROLE"),
        (["-n", "2", "--attach", "2", "x"], "--attach 2: there is no worker 2; the workers' ranks are 0 to 1"),
        (["-n", "2", "-H", "hosts", "--attach", "0", "x"], "that take it: local). A process on another host has no"),
        (["-n", "2", "--launcher", "slurm", "--attach", "0", "x"], "call debugpy.listen in one worker"),
        (["-n", "1", "python 'train.py"], "quotes of the command do not match"),
        (["-n", "1", "python", "-"], "python - reads its program from the standard input"),
        (
            ["-n", "1", "-H", "hosts", "--launcher", "local", "x"],
            "--launcher local does not take --hostfile; leave it out",
        ),
        (["-n", "1", "--sync-exclude", "*.pt", "x"], "does not take --sync-exclude; leave it out"),
    ],
)
def test_what_makes_no_sense_is_an_error(
    argv: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert main(argv) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert captured.err.startswith("launch.py: ")
    assert captured.out == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["--env-worker", "PASSWORD=hunter2"],
        ["--env-worker", "hunter2"],
        ["--env-worker", ":hunter2"],
        ["--env-worker", "1A:hunter2"],
        ["--env-worker", "PASS WORD:hunter2"],
        ["--env-server", "DMLC_ROLE:hunter2"],
        ["--env", "PASSWORD=hunter2"],
        ["--env", "PASSWORD:hunter2"],
        ["--env-wroker=PASSWORD:hunter2"],
        ["--env", "UNSET", "--env-worker", "PASSWORD:hunter2"],
    ],
)
def test_no_error_shows_a_value(argv: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(["-n", "1", *argv, "x"], {"PASSWORD": "hunter2"})
    assert caught.value.exit_code == 2
    assert "hunter2" not in str(caught.value)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-h"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: launch.py [-h] [--version] -n NUM_WORKERS")
    for word in ("-n NUM_WORKERS", "{local", "--sync-dst-dir", "command ..."):
        assert word in shown


def test_an_interrupt_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.launch.find", interrupted)
    assert main(["-n", "1", "x"]) == 130


def test_launchers_are_found_by_name() -> None:
    anything = job("-n", "1", "x")
    assert find("local", anything) is KINDS["local"] is local.KIND
    with pytest.raises(LaunchError, match="--launcher cloud is not valid; valid: local"):
        find("cloud", anything)


def test_a_job_needs_no_more_files_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    with pytest.raises(LaunchError, match=r"466 open files, but 256 are allowed; raise that: ulimit -n 466"):
        local.run(Job(num_workers=100, num_servers=100, command=("true",)))
    with pytest.raises(LaunchError, match=r"669 open files, but 256 are allowed"):
        local.run(Job(num_workers=100, num_servers=100, command=("true",), output=OutputOptions(log_dir="logs")))


@pytest.mark.parametrize(
    ("words", "environ", "verbose"),
    [
        ([], {}, False),
        (["--verbose"], {}, True),
        ([], {"KVSTORE_VERBOSE": "1"}, True),
        ([], {"KVSTORE_VERBOSE": "0"}, False),
    ],
)
def test_verbose_by_option_or_variable(words: list[str], environ: dict[str, str], verbose: bool) -> None:
    assert parse(["-n", "1", *words, "true"], environ).job.verbose is verbose


def test_a_variable_that_is_not_valid_is_an_error_of_the_command_line() -> None:
    with pytest.raises(LaunchError, match="KVSTORE_VERBOSE='loud' is not valid; valid: 1 or 0"):
        parse(["-n", "1", "true"], {"KVSTORE_VERBOSE": "loud"})


@pytest.mark.parametrize("words", [["--env", "KVSTORE_TIMEOUT_S"], ["--env-worker", "KVSTORE_TIMEOUT_S:x"], []])
def test_what_members_would_refuse_is_refused_before_they_start(words: list[str]) -> None:
    with pytest.raises(LaunchError, match="KVSTORE_TIMEOUT_S='x' is not valid; valid: a number of seconds"):
        parse(["-n", "1", *words, "true"], {"KVSTORE_TIMEOUT_S": "x"})


def test_what_other_hosts_do_not_get_is_not_checked() -> None:
    assert parse(["-n", "1", "-H", "hosts", "true"], {"KVSTORE_TIMEOUT_S": "x"}).kind == "ssh"


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
        (["--worker-memory", ""], {}),
        (["--replicas", "1", "--restarts", "0"], {"replicas": 1, "restarts": 0}),
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
    ("words", "options"),
    [
        ([], OutputOptions()),
        (["--log-dir", "/d", "--log-size", "500K", "--log-files", "1"], OutputOptions("/d", 500 << 10, 1)),
        (["--log-dir", "d"], OutputOptions(str(Path("d").absolute()))),
        (["--show", "none"], OutputOptions(show=())),
        (["--show=0,2-3"], OutputOptions(show=(0, 2, 3))),
        (["--show", "all"], OutputOptions()),
    ],
)
def test_what_the_options_say(words: list[str], options: OutputOptions) -> None:
    assert job(*words, "-n", "8", "x").output == options


@pytest.mark.parametrize("text", ["", "16", "0m", "63k", "-1m", "1.5g", "16mb", "9" * 5000 + "k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a size from 64k on; valid: such as 500k, 16m or 1g"):
        job("-n", "1", f"--log-size={text}", "x")


def test_the_file_is_where_launch_py_was_started() -> None:
    assert job("-n", "1", "--readers", "job.json", "x").cluster.readers == str(Path("job.json").absolute())


def wants(**cluster: Any) -> Job:
    return Job(1, 1, ("x",), cluster=Cluster(**cluster))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_takes_its_own_options_and_no_others(kind: str) -> None:
    assert KINDS[kind].takes <= set(VALUES)
    mine = {field: value for field, value in VALUES.items() if field in KINDS[kind].takes}
    assert find(kind, wants(**mine)) is KINDS[kind]
    for field in set(VALUES) - KINDS[kind].takes:
        with pytest.raises(LaunchError) as caught:
            find(kind, wants(**mine, **{field: VALUES[field]}))
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
        (["--worker-memory", "lots"], "'lots' is not a size; valid: a number with m or g"),
        (["--server-memory=-4g"], "is not a size"),
        (["--job-name", "a" * 41], "is not a job name; valid: up to 40 lowercase letters"),
        *((["--job-name", name], "is not a job name; valid: up to 40") for name in ("a-", "Mnist", "1a", "", "My Job")),
        (["--job-name", "-x"], "--job-name"),
        (["--replicas", "2"], "invalid choice: 2"),
        (["--checkpoint-every", "10"], "'10' is not valid; valid: a number of rounds such as 500r"),
        (["--checkpoint-every", "10m"], "give --checkpoint-dir DIR, too"),
        (["--show", "x"], "argument --show: 'x' is not a rank; valid: all, none, or ranks"),
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
def test_what_no_option_takes_is_an_error(
    dry: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*dry, "-n", "1", *words, "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("launch.py: ")
    assert message in captured.err


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
    assert find("local", wants()) is KINDS["local"]


# ---- the three ways to call it, which are one


ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sys.executable).parent / "launch.py"

WAYS = {
    "clone": [sys.executable, str(ROOT / "launcher" / "launch.py")],
    "module": [sys.executable, "-m", "launcher"],
    "installed": [str(INSTALLED)],
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "installed" and not INSTALLED.exists():
        pytest.skip("the package is not installed beside this interpreter")
    return WAYS[request.param]


def call(way: list[str], *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": str(ROOT)} if "-m" in way else {})
    return subprocess.run([*way, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=LONG)


def test_version(way: list[str], tmp_path: Path) -> None:
    done = call(way, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"launch.py of torch-kvstore {kvstore.__version__}\n", "")


def test_dir_lists_the_public_names_alone() -> None:
    code = "import launcher; print(*dir(launcher)); launcher.run; print(*dir(launcher))"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed == "LaunchError WorkerFailed run\n" * 2
    assert all(hasattr(launcher, name) for name in dir(launcher))
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        launcher.runs  # noqa: B018


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    done = call(WAYS["module"], "-n", "1", "no-such-command", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (127, "")


def test_too_many_open_files_are_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(kind: str, job: Job) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(launch, "find", find)
    assert launch.main(["-n", "1", "true"]) == 1
    assert capsys.readouterr().err == "launch.py: Too many open files: raise the limit with ulimit -n\n"


def test_files_in_the_package_do_not_shadow_modules() -> None:
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(ROOT / 'launcher')!r}); sys.argv[1:] = ['-h']\n"
        f"try: runpy.run_path({str(ROOT / 'launcher' / 'launch.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"assert sys.path[0] == {str(ROOT)!r} and {str(ROOT / 'launcher')!r} not in sys.path, sys.path\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_console_script_is_declared() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "launch.py = launcher.launch:main" in config["options.entry_points"]["console_scripts"].splitlines()


def test_the_oldest_libraries_that_are_allowed_are_those_that_are_tested_with() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    allowed = [line.replace(">=", "==") for line in config["options"]["install_requires"].split()]
    assert [line for line in (ROOT / "oldest.txt").read_text().split("\n") if line and line[0] != "#"] == allowed


def test_modules_that_hide_ours_are_named(tmp_path: Path) -> None:
    """A warning, for they may be meant; and servers start all the same."""
    for name in ("workers", "servers"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "__init__.py").write_text("print('theirs')")
    (tmp_path / "jobs" / "ok.py").write_text("import workers")
    done = call(WAYS["clone"], "-n", "1", "python jobs/ok.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[worker 0] theirs\n")
    assert done.stderr.splitlines()[0] == (
        "launch.py: warning: in the command, `import workers` takes "
        f"{tmp_path}/jobs/workers/__init__.py, which hides the package {ROOT}/workers; "
        "rename the file, unless that is meant"
    )


@pytest.mark.parametrize("package", ["launcher", "servers", "workers"])
def test_a_users_kvstore_module_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / "kvstore.py").touch()
    program = [sys.executable, "-c", f"import {package}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONG)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {package} needs the package kvstore, but `import kvstore` gives "
        f"<module 'kvstore' from '{tmp_path}/kvstore.py'>; rename that file"
    )


def test_status_is_kvstore_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["status", "no such job"]) == 1
    assert "kvstore-status: no job here is 'no such job'" in capsys.readouterr().err


def test_a_job_that_cannot_be_started_has_the_exit_code_of_a_shell() -> None:
    assert LaunchError("no hosts").exit_code == USAGE == 2
    assert LaunchError("no such command", NOT_FOUND).exit_code == 127
    assert (str(LaunchError("no hosts", CANNOT_EXECUTE)), CANNOT_EXECUTE) == ("no hosts", 126)


def test_a_failure_says_which_process_and_how() -> None:
    assert str(WorkerFailed("server 0", "was killed by SIGKILL")) == "server 0 was killed by SIGKILL"
    failure = WorkerFailed("worker 1", "raised ValueError: no data", "Traceback ...")
    assert str(failure) == "worker 1 raised ValueError: no data\n\nTraceback ..."
    assert (failure.process, failure.how, failure.details) == failure.args


def test_a_failure_can_be_handed_on_to_another_process() -> None:
    failure = pickle.loads(pickle.dumps(WorkerFailed("worker 1", "exited with code 7", "details")))
    assert str(failure) == "worker 1 exited with code 7\n\ndetails"


def test_how_many_workers_must_be_left_is_an_option_or_a_variable() -> None:
    given = {"KVSTORE_MIN_WORKERS": "1"}
    assert job("-n", "3", "x").cluster.min_workers == 0
    assert job("-n", "3", "--min-workers", "2", "x").cluster.min_workers == 2
    assert job("-n", "3", "x", environ=given).cluster.min_workers == 1
    assert job("-n", "3", "--min-workers", "0", "x", environ=given).cluster.min_workers == 0
