"""Processes: how they are started, what they pass on, and what they ask of the system."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import open_files
import pytest
from proc import state
from waiting import LONG, until

from kvstore.job import exec_helper, our_module, processes
from kvstore.job.exec_helper import FAILED
from kvstore.job.processes import Exit, TiedProcess, host_name, title, words
from kvstore.job.system import cores, cpu_us, memory_bytes, unsupported
from kvstore.job.threads import WAITING, variables

# ---- how processes are started: they have the words, environment, files and signals that they should, and end with us


SHELL = "/bin/sh"
ENV = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(argv: Sequence[str], env: Mapping[str, str] = ENV, **options: Any) -> bytes:
    """What a program prints."""
    tied = TiedProcess(argv, env, stdout=subprocess.PIPE, **options)
    tied.execute()
    printed = tied.process.communicate(timeout=LONG)[0]
    assert tied.process.returncode == 0
    return printed


def failure(argv: Sequence[str], env: Mapping[str, str] = ENV) -> OSError:
    """The error of a program that cannot be executed; its process has ended."""
    tied = TiedProcess(argv, env)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the callers look closer)
        tied.execute()
    assert tied.process.wait(LONG) == exec_helper.FAILED
    return caught.value


def test_it_gets_its_words_and_its_environment_to_the_byte() -> None:
    odd = ["a b", "", "\n", "重み", os.fsdecode(b"\xff\xfe"), "-c"]
    printed = run([SHELL, "-c", 'for word in "$@"; do printf "<%s>" "$word"; done', "sh", *odd])
    assert printed == b"".join(b"<%s>" % os.fsencode(word) for word in odd)
    env = {"A": "1=2", "B": "", "LC_ALL": "C", "E": os.fsdecode(b"\xff"), "PYTHONHOME": "/nowhere", "": "no name"}
    printed = run(["/usr/bin/env", "-0"], env)
    expected = [b"%s=%s" % (os.fsencode(name), os.fsencode(value)) for name, value in env.items() if name]
    assert sorted(printed.rstrip(b"\0").split(b"\0")) == sorted(expected)


def test_an_interpreter_in_a_c_locale_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_CTYPE", "C")  # Python then sets it to C.UTF-8, for its children too
    assert run(["/usr/bin/env", "-0"], {"A": os.fsdecode(b"\xff")}) == b"A=\xff\0"


def test_it_is_looked_for_on_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\necho here\n")
    (tmp_path / "program").chmod(0o700)
    assert run(["program"], {"PATH": f"/nowhere:{tmp_path}"}) == b"here\n"
    assert failure(["program"], {"PATH": "/nowhere"}).errno == errno.ENOENT


def test_what_cannot_be_executed_is_the_error_of_exec(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "binary").write_bytes(b"\0")
    (tmp_path / "binary").chmod(0o700)
    error = failure([str(tmp_path / "none")])
    assert isinstance(error, FileNotFoundError)
    assert (error.strerror, error.filename) == (os.strerror(errno.ENOENT), str(tmp_path / "none"))
    assert isinstance(failure([str(tmp_path / "plain")]), PermissionError)
    assert failure([str(tmp_path / "binary")]).errno == errno.ENOEXEC
    assert failure([SHELL, "x" * (1 << 18)]).errno == errno.E2BIG


@pytest.mark.parametrize(
    ("argv", "env", "text"),
    [
        (["true", "a\0b"], {}, "embedded null byte"),
        (["true"], {"A": "\0"}, "embedded null byte"),
        (["true"], {"A=B": "C"}, "illegal name of an environment variable: 'A=B'"),
    ],
)
def test_what_no_program_can_get_is_refused(argv: list[str], env: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TiedProcess(argv, env)


SHOW = """
import json, os, resource, signal
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "ignored": int(status["SigIgn"], 16),
    "blocked": int(status["SigBlk"], 16),
    "session": os.getsid(0) == os.getpid(),
}))
"""
# Python itself ignores SIGPIPE and SIGXFSZ; a shell says what it has inherited.
IGNORED = "sed -n 's/^SigIgn:[[:space:]]*//p' /proc/self/status"


def show(**options: Any) -> Any:
    return json.loads(run([sys.executable, "-S", "-c", SHOW], **options))


def test_it_has_no_files_but_those_it_was_given() -> None:
    alone = show()["files"]
    read, write = os.pipe()
    assert sorted({*alone, write}) == show(pass_fds=(write,))["files"]
    os.close(read)
    os.close(write)


def test_it_ignores_no_signals() -> None:
    assert int(run([SHELL, "-c", IGNORED]), 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
    assert show()["blocked"] == 0


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup launch.py ...
    try:
        assert int(run([SHELL, "-c", IGNORED]), 16) & 1 << signal.SIGHUP - 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_can_lead_a_session() -> None:
    assert not show()["session"]
    assert show(start_new_session=True)["session"]


def test_it_has_the_limit_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "given_files", None)
    with open_files.at_most(256):
        processes.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
        assert show()["limit"] == 256


def test_the_keeper_is_told_before_it_runs() -> None:
    read, write = os.pipe()
    tied = TiedProcess(["true"], ENV, keeper_fd=write)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123 (a file descriptor)
        assert pipe.read() == b"%d\n" % tied.process.pid  # and it holds the pipe no longer
    tied.execute()
    assert tied.process.wait(LONG) == 0


def test_a_keeper_that_has_died_is_no_obstacle() -> None:
    read, write = os.pipe()
    os.close(read)
    assert run(["echo", "here"], keeper_fd=write) == b"here\n"
    os.close(write)


def test_a_process_that_is_killed_before_it_runs_is_no_error() -> None:
    tied = TiedProcess(["echo", "x" * 100_000], ENV)
    tied.process.kill()
    assert tied.process.wait(LONG) == -signal.SIGKILL
    tied.execute()


def test_a_process_that_does_not_begin_is_one() -> None:
    tied = TiedProcess(["true"], ENV)
    os.kill(tied.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"its process has not begun within 0\.1 s: 'true'"):
        tied.execute(0.1)
    assert tied.process.wait(LONG) == -signal.SIGKILL


def test_a_process_whose_start_is_interrupted_ends() -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise TimeoutError("the user's")

    tied = TiedProcess(["true"], ENV)
    os.kill(tied.process.pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="the user's"):
            tied.execute()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert tied.process.wait(LONG) == -signal.SIGKILL


PARENT = """
import subprocess, sys, time
from kvstore.job.processes import TiedProcess
tied = TiedProcess(["sleep", "600"], {"PATH": "/usr/bin:/bin"})
if sys.argv[1] == "run":
    tied.execute()
print(tied.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["run", "prepare"])
def test_it_does_not_outlive_this_process(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, how], env=ENV, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until(lambda: gone(child), "the child to end")


def gone(pid: int) -> bool:
    try:
        return state(pid) == "Z"
    except OSError:
        return True


# A lock that another thread holds when a process is forked is what code between fork and exec waits for, for ever.
LOCKED = """
import os, threading
from kvstore.job.processes import TiedProcess
lock = threading.Lock()
lock.acquire()
os.register_at_fork(after_in_child=lock.acquire)
tied = TiedProcess(["true"], {"PATH": "/usr/bin:/bin"})
tied.execute()
print(tied.process.wait())
"""


def test_what_threads_hold_does_not_matter() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], env=ENV, capture_output=True, timeout=LONG, check=True)
    assert done.stdout == b"0\n"


@pytest.mark.parametrize(
    ("how", "text", "status"),
    [
        (Exit(), "exited with code 0", 0),
        (Exit(code=7), "exited with code 7", 7),
        (Exit(code=137), "exited with code 137 (128 + SIGKILL)", 137),
        (Exit(code=255), "exited with code 255", 255),
        (Exit(signum=9), "was killed by SIGKILL", 137),
        (Exit(signum=42), "was killed by signal 42", 170),
    ],
)
def test_how_it_is_said(how: Exit, text: str, status: int) -> None:
    assert (str(how), how.status) == (text, status)


@pytest.mark.parametrize(("returncode", "how"), [(0, Exit()), (7, Exit(code=7)), (-9, Exit(signum=9))])
def test_how_a_child_ended(returncode: int, how: Exit) -> None:
    assert Exit.of(returncode) == how


# ---- the programs that become other ones: what they pass on, and which modules they take


SHOW_X = "import os; print(sorted(name for name in os.environ if name.startswith('X_')), os.environ.get('X_TEXT'))"


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    parent: int | None = None,
    files: int = -1,
    keeper: int = -1,
    missing: int = 0,
) -> tuple[subprocess.Popen[str], socket.socket]:
    """Start the helper and send it the request, of which the last ``missing`` bytes never come."""
    ours, theirs = socket.socketpair()
    fields = [*argv, *(f"{name}={value}" for name, value in env.items())]
    request = b"".join(os.fsencode(field) + b"\0" for field in fields)
    parent = os.getpid() if parent is None else parent
    numbers = (parent, theirs.fileno(), len(request), len(argv), files, keeper)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", exec_helper.__file__, *map(str, numbers)],
            pass_fds=tuple({theirs.fileno(), keeper} - {-1}),
            stdout=subprocess.PIPE,
            text=True,
        )
    ours.settimeout(LONG)
    ours.sendall(request[: len(request) - missing])
    if missing:
        ours.shutdown(socket.SHUT_WR)
    return process, ours


def test_it_becomes_the_program_with_its_words_and_environment() -> None:
    argv = [sys.executable, "-S", "-c", SHOW_X]
    process, channel = start(argv, {"X_TEXT": "a=b\n c", "X_EMPTY": "", "PATH": os.defpath})
    with channel, process:
        assert channel.recv(16) == b"", "the channel closes when the program runs"
        assert process.communicate(timeout=LONG)[0] == "['X_EMPTY', 'X_TEXT'] a=b\n c\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [({}, 5), ({"missing": 1}, FAILED), ({"parent": 1 if os.getppid() != 1 else 2}, FAILED)],
    ids=["looked for on the path that it gets", "a parent that has given up", "a parent that is gone"],
)
def test_whether_the_program_runs(options: dict[str, int], code: int) -> None:
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, **options)
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == code


@pytest.mark.parametrize(("program", "error"), [("/nowhere/program", errno.ENOENT), ("/", errno.EACCES)])
def test_a_program_that_cannot_be_executed_is_an_error_number(program: str, error: int) -> None:
    process, channel = start([program], {})
    with channel, process:
        assert int(channel.recv(16)) == error
    assert process.returncode == FAILED


def test_the_number_of_files_is_limited() -> None:
    show = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    process, channel = start([sys.executable, "-S", "-c", show], {}, files=77)
    with channel, process:
        assert process.communicate(timeout=LONG)[0].split() == [
            "77",
            str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        ]


def test_the_keeper_is_told_before_the_program_runs() -> None:
    read, write = os.pipe()
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, keeper=write)
    os.close(write)
    with channel, process, os.fdopen(read) as told:
        assert told.read() == f"{process.pid}\n", "and nobody holds the pipe any more"
    assert process.returncode == 5


def test_a_keeper_that_has_died_does_not_matter() -> None:
    read, write = os.pipe()
    os.close(read)
    process, channel = start(["sh", "-c", "exit 5"], {"PATH": os.defpath}, keeper=write)
    os.close(write)
    with channel, process:
        assert channel.recv(16) == b""
    assert process.returncode == 5


THEIRS = "print('theirs')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose modules have the names of all our packages, and of the program's neighbors."""
    for name in our_module.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(THEIRS)
        (tmp_path / name / "__main__.py").write_text(THEIRS)
    (tmp_path / "files.py").write_text(THEIRS)
    return tmp_path


@pytest.mark.parametrize("on_path", [False, True])
def test_servers_are_ours(folder: Path, on_path: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "PYTHONPATH"))}
    env["DMLC_ROLE"] = "server"
    if on_path:
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        words(sys.executable, "servers"), cwd=folder, env=env, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert done.stdout == ""


def test_only_our_packages_are_found_in_our_directory() -> None:
    finder = our_module.OurPackages()
    for name in our_module.PACKAGES:
        spec = finder.find_spec(name, None)
        assert spec is not None
        assert spec.origin == f"{our_module.ROOT}/{name}/__init__.py"
    assert finder.find_spec("tests", None) is None
    assert finder.find_spec("kvstore.job", ["/nowhere"]) is None


# ---- what a process asks of the system and is called there: its cores, memory and threads, and what Windows lacks


ROOT = Path(__file__).resolve().parents[3]

WINDOWS = """
import os, sys
import importlib.util, subprocess  # which choose by the system, and were chosen for this one
sys.platform = "win32"
for name in ("fcntl", "resource"):
    sys.modules[name] = None
del os.register_at_fork, os.getuid
"""
STORE = """
import kvstore as kv
try:
    kv.create("dist_async")
except kv.ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit("torch" in sys.modules)
"""
CALL = """
import launcher
try:
    launcher.run(print)
except launcher.LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(0)
"""
COMMAND = "import runpy; sys.argv[1:] = ['-n', '1', 'true']; runpy.run_module('launcher', run_name='__main__')"


@pytest.mark.parametrize(
    ("code", "what", "status"),
    [(STORE, "kv.create('dist_async')", 0), (CALL, "launcher.run", 0), (COMMAND, "launch.py", 2)],
)
def test_windows_is_told_so_at_once(code: str, what: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + code], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith(f"{what} runs on Linux and macOS, but not on Windows")
    assert "run it in WSL 2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_other_systems_are_not(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert unsupported("launch.py") == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")
def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    assert cores() == len(before)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_memory_is_what_is_there_now():
    before = memory_bytes()
    with mmap.mmap(-1, 64 << 20) as fresh:  # the heap might take pages that it has kept
        fresh.write(bytes(1 << 20) * 64)
        held = memory_bytes()
    assert held - before > 60 << 20
    assert held - memory_bytes() > 60 << 20


def test_without_proc_memory_is_the_most_there_has_been():
    assert memory_bytes(Path("/proc/no-such-file")) >= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 0.9


def test_processor_time_grows():
    before = cpu_us()
    sum(range(300_000))
    assert cpu_us() > before


NAMES = """
import ctypes, os, sys, threading
from kvstore.job.processes import entitle

def called():
    return open("/proc/self/comm").read().strip()

def child():
    read, write = os.pipe()
    if not os.fork():
        os.write(write, called().encode())
        os._exit(0)
    os.wait()
    return os.read(read, 100).decode()

if sys.argv[1:]:
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
before = called()
thread = threading.Thread(target=entitle, args=("worker", 3))
thread.start()
thread.join()
print(before, called(), child(), sep=",")
if not sys.argv[1:]:
    ctypes.CDLL(None).prctl(15, b"my own", 0, 0, 0)
    print(called(), child(), sep=",")
"""


def named(*words: str) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", NAMES, *words], capture_output=True, text=True, check=True)
    return [line.split(",") for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="processes have such names on Linux")
def test_a_process_is_called_after_its_member_and_its_forks_are_not_nor_is_one_that_has_a_name() -> None:
    first, later = named()
    assert first == [first[0], "worker-3", first[0]], "the name is the process's, whichever thread gives it"
    assert first[0].startswith("python")
    assert later == ["my own", "my own"], "a name that the program gives later is inherited, as always"
    assert named("trainer") == [["trainer"] * 3]


def test_titles_fit_and_say_who() -> None:
    assert [title("scheduler", 0), title("standby", 1), title("server", -1)] == ["scheduler", "standby-1", "server"]
    assert len(title("aggregator", 4095)) <= 15, "which is what Linux keeps"


def test_a_host_has_a_name_that_can_be_sent() -> None:
    assert host_name().encode()


@pytest.mark.parametrize(("role", "more"), [("server", {}), ("worker", {"GOMP_SPINCOUNT": "1000"})])
def test_threads_do_not_keep_cores_while_they_wait_and_members_of_a_role_share_them(
    role: str, more: dict[str, str]
) -> None:
    made = variables({}, role, cores=8, siblings=3)
    assert made == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", **more}


@pytest.mark.parametrize("siblings", [0, 3, 8])
def test_each_has_a_thread_at_least(siblings: int) -> None:
    assert variables({}, "server", cores=2, siblings=siblings)["OMP_NUM_THREADS"] == ("2" if not siblings else "1")


@pytest.mark.parametrize("cores", [0, 8])
def test_an_aggregator_has_one_thread_unless_a_number_is_set(cores: int) -> None:
    assert variables({}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    assert variables({"OMP_NUM_THREADS": "3"}, "aggregator", cores=cores) == {"OMP_WAIT_POLICY": "passive"}


def test_where_nobody_knows_the_siblings_the_number_is_left_to_torch() -> None:
    assert variables({}, "server") == {"OMP_WAIT_POLICY": "passive"}


def test_the_scheduler_has_no_torch() -> None:
    assert variables({}, "scheduler", cores=8) == {}


@pytest.mark.parametrize("name", WAITING)
def test_whoever_says_how_threads_wait_in_any_runtimes_words_is_obeyed(name: str) -> None:
    assert variables({name: "1000"}, "worker", cores=4) == {"OMP_NUM_THREADS": "4"}


def test_a_number_that_is_set_stays_and_an_empty_value_counts_as_not_set() -> None:
    env = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": ""}
    assert variables(env, "server", cores=4) == {"OMP_WAIT_POLICY": "passive"}
    assert variables({"OMP_NUM_THREADS": ""}, "server", cores=4)["OMP_NUM_THREADS"] == "4"
