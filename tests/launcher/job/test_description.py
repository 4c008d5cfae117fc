"""What may be asked for, the command that is run, and what --dry-run shows."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from every_option import VALUES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched import ROOT
from programs_of_ours import run

from kvstore.job import our_module
from launcher.agents.links.link import ENLIST
from launcher.errors import LaunchError
from launcher.job import dryrun
from launcher.job.command import (
    PROGRAM,
    agent_argv,
    argv_of,
    module_directories,
    program_argv,
    require_program,
    shadows,
    shim,
)
from launcher.job.description import MAX_PER_ROLE, RESERVED, Cluster, Injection, Job, OutputOptions, parse_ranks
from launcher.job.tasks import HostEnvironment, Rendezvous, render
from launcher.kinds.registry import KINDS, find
from launcher.launch import main

# ---- what may be asked for


AT = Rendezvous(uri="ipc:///t/scheduler", port=0, mark="kvstore-0-1-x")


def test_what_is_given_is_what_is_not_at_its_default() -> None:
    assert {field.name for field in fields(Cluster)} == set(VALUES)
    assert Cluster().given() == []
    assert Cluster(**VALUES).given() == list(VALUES)
    for field, value in VALUES.items():
        assert Cluster(**{field: value}).given() == [field]


def job(**options: object) -> Job:
    return Job(**{"num_workers": 2, "num_servers": 1, "command": ("python", "train.py"), **options})  # type: ignore[arg-type]


def test_nothing_that_is_printed_shows_a_value() -> None:
    secret = job(env_server={"A": "hunter2"}, env_worker={"B": "hunter2"})
    around = HostEnvironment(environ={"C": "hunter2"}, python="/py", cores=1)
    assert "hunter2" not in repr((secret, around, render(secret, AT, around)))


@pytest.mark.parametrize("count", [0, -1, MAX_PER_ROLE + 1])
@pytest.mark.parametrize("what", ["workers", "servers"])
def test_the_counts_have_bounds(what: str, count: int) -> None:
    with pytest.raises(LaunchError, match=f"{count} {what} are not possible; valid: 1 to {MAX_PER_ROLE}"):
        job(**{f"num_{what}": count})


@pytest.mark.parametrize("command", [(), ("",), (" ", "")])
def test_a_job_has_a_command(command: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="command is missing"):
        job(command=command)


@pytest.mark.parametrize("option", ["env_server", "env_worker"])
def test_the_contract_cannot_be_overridden(option: str) -> None:
    with pytest.raises(LaunchError, match="cannot set DMLC_ROLE") as caught:
        job(**{option: {"DMLC_ROLE": "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", None),
        ("none", ()),
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1,1-2", (1, 2, 3)),
        ("007", (7,)),
        ("5-5", (5,)),
    ],
)
def test_ranks(text: str, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a rank"),
        ("0,", "'' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("1-", "'1-' is not a rank"),
        ("a", "'a' is not a rank"),
        ("0 1", "'0 1' is not a rank"),
        ("²", "'²' is not a rank"),
        ("0,none", "'none' is not a rank"),
        ("3-1", "3-1 ends before it begins"),
        ("0-999999999", "0-999999999 are too many workers"),
        ("9" * 5000, "is not a rank"),
    ],
)
def test_what_names_no_ranks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; valid: all, none, or ranks of workers such as 0, 0,2 or 0,4-7"):
        parse_ranks(text)


@pytest.mark.parametrize(("workers", "valid"), [(1, "the workers' rank is 0"), (4, "the workers' ranks are 0 to 3")])
def test_a_job_has_the_workers_that_are_to_be_shown(workers: int, valid: str) -> None:
    Job(workers, 1, ("x",), output=OutputOptions(show=(0,)))
    with pytest.raises(LaunchError, match=f"--show 4: there is no worker 4; {valid}"):
        Job(workers, 1, ("x",), output=OutputOptions(show=(0, 4, 5)))


def test_only_workers_are_hidden() -> None:
    options = OutputOptions(show=(1,))
    assert [rank for rank in range(3) if options.shows("worker", rank)] == [1]
    assert options.shows("server", 0)
    assert options.shows("scheduler", 0)
    assert OutputOptions().shows("worker", 5)


@pytest.mark.parametrize(
    ("text", "injection", "shown"),
    [
        (
            "kill:server:1@round:100",
            Injection("kill", "server", 1, round=100),
            "SIGKILL for server 1, at its round 100",
        ),
        (
            "stop:standby:0@10s",
            Injection("stop", "standby", 0, after_s=10),
            "SIGSTOP for the standby of server 0, 10 s after the start",
        ),
        (
            "cont:worker:12@0.25s",
            Injection("cont", "worker", 12, after_s=0.25),
            "SIGCONT for worker 12, 0.25 s after the start",
        ),
        (
            "kill:scheduler@5s",
            Injection("kill", "scheduler", 0, after_s=5),
            "SIGKILL for scheduler, 5 s after the start",
        ),
    ],
)
def test_a_fault_is_who_what_and_when(text: str, injection: Injection, shown: str) -> None:
    assert Injection.parse(text) == injection
    assert str(injection) == shown
    assert injection.member == (injection.role, injection.rank)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected ACTION:ROLE:RANK@WHEN, such as kill:server:1@round:100"),
        ("kill:server:1", "expected ACTION:ROLE:RANK@WHEN"),
        ("kill:server:1@10", "expected ACTION"),
        ("kill:server:1@round:0", "expected ACTION"),
        ("kill:server:-1@10s", "expected ACTION"),
        ("kill:server:1@10s ", "expected ACTION"),
        ("term:server:1@10s", "there is no action term; valid: kill, stop, cont"),
        ("kill:aggregator:1@10s", "there is no role aggregator; valid: scheduler, server, standby, worker"),
        ("kill:server@10s", "a server has a rank"),
        ("kill:scheduler:0@10s", "a scheduler has no rank"),
        ("kill:worker:0@round:3", "a worker counts no rounds; give a time, such as kill:worker:0@10s"),
        ("kill:scheduler@round:3", "a scheduler counts no rounds; give a time, such as kill:scheduler@10s"),
        ("cont:server:0@round:3", "a stopped process sees no round; give a time, such as cont:server:0@10s"),
    ],
)
def test_what_makes_no_sense_is_an_error(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Injection.parse(text)
    assert str(caught.value).startswith(f"--inject {text}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("member", ["server:2", "standby:0", "worker:1"])
def test_the_member_must_be_there(member: str) -> None:
    with pytest.raises(LaunchError, match="no such member; it has 1 workers, 2 servers and 0 standbys"):
        Job(1, 2, ("x",), cluster=Cluster(inject=(f"kill:{member}@1s",)))
    assert Job(2, 3, ("x",), cluster=Cluster(replicas=1, inject=(f"kill:{member}@1s",))).injections


def test_actions_are_signals() -> None:
    signals = [Injection.parse(f"{action}:scheduler@1s").signal for action in ("kill", "stop", "cont")]
    assert signals == [signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT]


# ---- command


PYTHON = "/a b/bin/python"
HOSTILE = ["a b", "it's", '"', "$(echo gone)", "`id`", "x;y", "new\nline", "", "*", "ünï", "--", "\\"]
WORDS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


def test_separate_words_stay_as_they_are() -> None:
    assert argv_of(["python", "train.py", *HOSTILE], PYTHON) == (PYTHON, "train.py", *HOSTILE)


@given(st.lists(WORDS, min_size=1))
def test_separate_words_are_never_interpreted(words: list[str]) -> None:
    assert argv_of(["train", *words], PYTHON) == ("train", *words)


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("python train.py --lr 0.1", (PYTHON, "train.py", "--lr", "0.1")),
        ("python3 -m train", (PYTHON, "-m", "train")),
        ("./train 'a b' \"c d\" e\\ f --x=y", ("./train", "a b", "c d", "e f", "--x=y")),
        ("pythonic x", ("pythonic", "x")),
        ("train", ("train",)),
    ],
)
def test_a_plain_string_is_split_and_needs_no_shell(text: str, argv: tuple[str, ...]) -> None:
    assert argv_of([text], PYTHON) == argv


@pytest.mark.parametrize(
    "text",
    [
        "cd x && python train.py",
        "LR=0.1 python train.py",
        "python train.py > log",
        "python train.py $HOME",
        "python train.py '$(id)'",
        "exit 7",
        "python a.py\npython b.py",
        "python *.py",
    ],
)
def test_a_string_that_needs_the_shell_gets_it_unchanged(text: str) -> None:
    assert argv_of([text], PYTHON) == ("/bin/sh", "-c", text)


@given(st.lists(WORDS.filter(bool), min_size=1))
def test_a_quoted_string_means_what_it_says(words: list[str]) -> None:
    argv = argv_of([shlex.join(["train", *words])], PYTHON)
    assert argv == ("train", *words) or argv == ("/bin/sh", "-c", shlex.join(["train", *words]))


@pytest.mark.parametrize("command", [[""], ["  "], ["''"], ["", "x"], []])
def test_an_empty_command_is_an_error(command: list[str]) -> None:
    with pytest.raises(LaunchError, match="empty"):
        argv_of(command, PYTHON)


def test_an_open_quote_is_an_error_that_shows_it() -> None:
    with pytest.raises(LaunchError, match=r"no closing quotation.*python 'train\.py"):
        argv_of(["python 'train.py"], PYTHON)


def test_the_shim_is_that_interpreter(tmp_path) -> None:
    file = tmp_path / "python"
    file.write_text(shim(sys.executable))
    file.chmod(0o700)
    script = "import sys; print(sys.executable, sys.prefix, sys.argv[1:])"
    ours = subprocess.run([sys.executable, "-c", script, *HOSTILE], capture_output=True, check=True)
    shimmed = subprocess.run([file, "-c", script, *HOSTILE], capture_output=True, check=True)
    assert shimmed.stdout == ours.stdout


def test_the_shim_quotes_the_path() -> None:
    assert shim("/a'b $x/python").splitlines()[1] == "exec '/a'\"'\"'b $x/python' \"$@\""


@pytest.mark.parametrize(
    ("command", "directories"),
    [
        (["python", "train.py", "other/x.py"], ["."]),
        (["python jobs/train.py --lr 0.1"], ["jobs"]),
        (["nice -n 5 /opt/python '/a b/train.py'"], ["/a b"]),
        (["python -m train"], ["."]),
        (["python", "-c", "import train.py"], ["."]),
        (["./train"], []),
        (["no 'end"], []),
    ],
)
def test_where_a_program_looks_for_modules(command: list[str], directories: list[str]) -> None:
    assert module_directories(command, {}) == directories
    assert module_directories(command, {"PYTHONPATH": "/a::b"}) == [*directories, "/a", "b"]


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-"],
        ["python -"],
        ["python3.12 -u - --epochs 2"],
        ["python", "-W", "ignore", "-Xdev", "-"],
        ["/opt/venv/bin/python -"],
        ["env", "A=1", "python", "-"],
        ["timeout 60 python -u -"],
        ["python"],
        ["python -u"],
    ],
)
def test_a_python_that_would_read_its_program_from_nowhere_is_refused(command: list[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"python\S*.* reads its program from the standard input, .* python train\.py"
    ):
        require_program(command)


@pytest.mark.parametrize(
    "command",
    [
        ["python train.py -"],
        ["python", "-u", "train.py"],
        ["python -m train -"],
        ["python -c 'print(1)' -"],
        ["python", "-uc", "print(1)"],
        ["python -W ignore train.py"],
        ["python --version"],
        ["python -V"],
        ["python - < train.py"],
        ["env A=1 ./train.py python -"],
        ["cat -"],
        [""],
    ],
)
def test_other_commands_have_a_program(command: list[str]) -> None:
    require_program(command)


@pytest.mark.parametrize(
    ("path", "root"), [("", ROOT), ("{}", ROOT), ("./:{}/none", ROOT), (f"{{}}:{ROOT}", ROOT), ("{}", None)]
)
def test_an_agent_is_ours_whatever_the_working_directory_and_the_path_hold(
    shadowed: Path, path: str, root: Path | None
) -> None:
    environ = {ENLIST: "hunter2"} | ({"PYTHONPATH": path.format(shadowed)} if path else {})
    code, out, err = run(agent_argv(sys.executable, root and str(root)), shadowed, **environ)
    assert (code, out) == (1, b"")
    assert err.startswith(f"the agent cannot start: {ENLIST} is not a ticket")
    assert "hunter2" not in err


def test_a_clone_may_be_anywhere(tmp_path: Path) -> None:
    clone = tmp_path / 'a clone\'s "place" {x}'
    (clone / "ours").mkdir(parents=True)
    (clone / "ours" / "__init__.py").write_text("def main():\n    print('here')\n    return 3\n")
    assert run(program_argv(sys.executable, "ours", str(clone)), tmp_path) == (3, b"here\n", "")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "wanted.py").write_text("def main():\n    print('there')\n")
    theirs = {"PYTHONPATH": str(tmp_path / "theirs")}
    assert run(program_argv(sys.executable, "wanted", str(clone)), tmp_path, **theirs) == (0, b"there\n", "")
    assert program_argv("py", "ours") == ["py", "-c", PROGRAM.format(first="", module="ours")]


def test_a_file_and_a_package_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "workers.py").touch()
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").touch()
    assert [str(shadow) for shadow in shadows([str(tmp_path)])] == [
        f"`import kvstore` takes {tmp_path}/kvstore/__init__.py, which hides the package {our_module.ROOT}/kvstore; "
        "rename the file, unless that is meant",
        f"`import workers` takes {tmp_path}/workers.py, which hides the package {our_module.ROOT}/workers; "
        "rename the file, unless that is meant",
    ]


def test_what_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()  # without __init__.py: an installed package goes first
    assert shadows([str(tmp_path), "/nowhere", our_module.ROOT]) == []
    (tmp_path / "kvstore.py").touch()
    assert shadows([our_module.ROOT, str(tmp_path)]) == []


def test_a_link_to_ours_is_ours(tmp_path: Path) -> None:
    (tmp_path / "workers").symlink_to(Path(our_module.ROOT, "workers"))
    assert shadows([str(tmp_path)]) == []


# ---- what --dry-run shows of each kind: everything but the values of the user's variables


NAMES = st.from_regex(r"[A-Z_]{1,12}|PYTHONPATH|OMP_NUM_THREADS|KVSTORE_TIMEOUT_S", fullmatch=True).filter(
    lambda name: name not in RESERVED and name != "PATH"
)
# Long enough not to stand there by chance.
TEXTS = (
    st.binary(min_size=1, max_size=9).filter(lambda value: 0 not in value).map(lambda v: os.fsdecode(b"hunter2" + v))
)
VARIABLES = st.dictionaries(NAMES, TEXTS, max_size=3)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a hostfile; nothing may come to be there."""
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "hosts").write_text("node1 slots=1\nnode2\nlocalhost\n")
    monkeypatch.chdir(directory)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield directory
    assert [file.name for file in directory.iterdir()] == ["hosts"]


def cluster(kind: str) -> Cluster:
    if kind == "ssh":
        return Cluster(hostfile="hosts", sync_dst_dir="/job")
    return Cluster(image="me/mine") if kind == "kubernetes" else Cluster()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mpi"])  # tests/launcher/kinds/test_mpi.py
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(VARIABLES, VARIABLES, VARIABLES)
def test_no_value_is_shown(
    kind: str, here: Path, server: dict[str, str], worker: dict[str, str], environ: dict[str, str]
) -> None:
    job = Job(3, 2, ("python train.py --lr 0.1",), server, worker, tuple(environ), cluster(kind))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        shown = find(kind, job).dry_run(job)
    for name, value in [*server.items(), *worker.items(), *environ.items()]:
        assert value not in shown
        assert kind in ("local", "slurm") or name in shown
    assert "hunter2" not in shown
    assert "train.py" in shown


def test_ssh_shows_who_runs_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "3", "-s", "1", "-H", "hosts", "--sync-dst-dir", "/job", "--dry-run", "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("# ") and not line.startswith("#  ")] == [
        "# scheduler: on this machine",
        "# node1: server 0, worker 0",
        "# node2: worker 1",
        "# localhost: worker 2",
    ]
    commands = [line.split()[0] for line in lines if not line.startswith("#")]
    assert commands == ["rsync", "ssh", "rsync", "ssh", "rsync", sys.executable]


def test_ssh_shows_the_aggregators(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-n", "5", "-s", "1", "-H", "hosts", "--dry-run"]
    assert main([*words, "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("# ") and not line.startswith("#  ")][1:] == [
        "# node1: server 0, worker 0",
        "# node2: aggregator 0, worker 1, worker 2",
        "# localhost: aggregator 1, worker 3, worker 4",
    ]
    (shown,) = (line for line in lines if line.startswith("#   aggregator 1: "))
    assert "DMLC_ROLE=aggregator" in shown
    assert "KVSTORE_NUM_AGGREGATORS=2" in shown
    assert shown.endswith(" servers")
    assert [line.split("KVSTORE_AGGREGATOR=")[1].split()[0] for line in lines if line.startswith("#   worker")] == [
        *("-1", "0", "0", "1", "1")
    ]
    assert main([*words, "--no-host-aggregation", "x"]) == 0
    assert "aggregator" not in capsys.readouterr().out.lower()


def test_only_what_is_computed_has_a_value() -> None:
    shown = dryrun.variables({"DMLC_ROLE": "worker", "KVSTORE_SECRET_KEY": "hunter2", "B": "", "A": "hunter2"})
    assert shown == "A=... B=... DMLC_ROLE=worker KVSTORE_SECRET_KEY=..."


@pytest.mark.parametrize("least", [-1, 4])
def test_no_more_workers_can_be_needed_than_there_are(least: int) -> None:
    with pytest.raises(LaunchError, match=f"--min-workers {least}: the job has 3 workers .*valid: 1 to 3, or 0"):
        Job(3, 1, ("x",), cluster=Cluster(min_workers=least))
    assert Job(3, 1, ("x",), cluster=Cluster(min_workers=3)).cluster.min_workers == 3


@pytest.mark.parametrize(
    ("workers", "least", "most", "why"), [(1, 1, 3, "must be 2"), (3, 1, 2, "valid: 3"), (2, 0, 3, "needs --min")]
)
def test_workers_are_added_to_a_job_of_several_that_goes_on_without_some(
    workers: int, least: int, most: int, why: str
) -> None:
    with pytest.raises(LaunchError, match=f"--max-workers {most}.*{why}"):
        Job(workers, 1, ("x",), cluster=Cluster(min_workers=least, max_workers=most)).check_max_workers()
    Job(2, 1, ("x",), cluster=Cluster(min_workers=1, max_workers=2)).check_max_workers()
