from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import parse
from launcher.errors import LaunchError
from launcher.job.description import Job, OutputOptions
from launcher.kinds import local
from launcher.kinds.registry import KINDS, find
from launcher.launch import main


def job(*argv: str, environ: dict[str, str] | None = None) -> Job:
    return parse(argv, environ or {})[1]


def test_the_readme_line() -> None:
    kind, parsed, dry_run = parse(["-n", "2", "-s", "3", "--launcher", "local", "python train_cifar10.py"], {})
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


def test_env_options_repeat_and_values_may_hold_anything() -> None:
    parsed = job("-n", "1", "--env-server", "A:1", "--env-worker", "B:x:y= z", "--env-worker", "C:", "--env", "D", "x",
                 environ={"D": "4"})  # fmt: skip
    assert (parsed.env_server, parsed.env_worker, parsed.env_names) == ({"A": "1"}, {"B": "x:y= z", "C": ""}, ("D",))


def test_the_default_launcher() -> None:
    assert parse(["-n", "1", "x"], {})[0] == "local"
    assert parse(["-n", "1", "-H", "hosts", "x"], {})[0] == "ssh"
    kind, parsed, _ = parse(["-n", "1", "-H", "hosts", "--sync-dst-dir", "/d", "x"], {})
    assert (kind, parsed.cluster.hostfile, parsed.cluster.sync_dst_dir) == ("ssh", "hosts", "/d")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "-n/--num-workers"),
        (["x"], "-n/--num-workers"),
        (["-n", "0", "x"], "'0' is not a number from 1 to 4096"),
        (["-n", "two", "x"], "'two' is not a number"),
        (["-n", "²", "x"], "is not a number"),
        (["-n", "9" * 5000, "x"], "is not a number"),
        (["-n", "1", "-s", "0", "x"], "'0' is not a number"),
        (["-n", "1", "-s", "-1", "x"], "is not a number"),
        (["-n", "1"], "command is missing"),
        (["-n", "1", "--"], "command is missing"),
        (["-n", "1", "  "], "command is missing"),
        (["-n", "1", "--launcher", "cloud", "x"], "invalid choice: 'cloud'"),
        (["-n", "1", "--checkpoint-every", "10m", "x"], "give --checkpoint-dir DIR, too"),
        (["-n", "1", "--env", "NOT_SET", "x"], "--env NOT_SET: this variable is not set"),
        (["-n", "1", "--lr", "0.1", "x"], "there is no option --lr"),
        (["-n", "1", "--env-worker", "DMLC_ROLE:x", "y"], "--env-worker cannot set DMLC_ROLE"),
        (["-n", "2", "--attach", "2", "x"], "--attach 2: there is no worker 2; the workers' ranks are 0 to 1"),
        (["-n", "2", "--attach", "0", "--live", "--show", "all", "x"], "--live draws on it; leave one of them out"),
        (["-n", "2", "-H", "hosts", "--attach", "0", "x"], "that take it: local). A process on another host has no"),
        (["-n", "2", "--launcher", "slurm", "--attach", "0", "x"], "call debugpy.listen in one worker"),
        (["-n", "1", "python 'train.py"], "quotes of the command do not match"),
        (["-n", "1", "python", "-"], "python - reads its program from the standard input"),
        (
            ["-n", "1", "-H", "hosts", "--launcher", "local", "x"],
            "--launcher local does not take --hostfile; leave it out",
        ),
        (["-n", "1", "--sync-exclude", "*.pt", "x"], "does not take --sync-exclude; leave it out"),
        (["-n", "1", "--worker-memory", "lots", "x"], "'lots' is not a size; valid: a number with m or g"),
        (["-n", "1", "--job-name", "My Job", "x"], "'My Job' is not a job name"),
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
