"""The words that are executed: those of the user's command, and those that start the project's programs. No I/O.

A command of several words is executed as it is. A command of one string goes to the shell only if it needs one. Without
a shell there is one process less to signal, and the exit status is that of the program.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from typing import NamedTuple

from kvstore.job.our_module import ROOT
from launcher.errors import LaunchError

SHELL = "/bin/sh"
PYTHONS = ("python", "python3")

# Characters that a shell interprets. In quotes it does not, and then the shell is harmless, too.
_META = frozenset("|&;<>()$`*?[]{}!#~\n\r")
_PYTHON = re.compile(r"python[0-9.]*")
_BEFORE_PROGRAMS = frozenset(["env", "exec", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "timeout"])
_ENDS_OPTIONS = re.compile(r"-[^WX]*[cmVh]")  # a program, or nothing to run
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_]*=")
# Commands that exist only in a shell, such as "exit 7".
# fmt: off
_BUILTINS = frozenset([
    ".", ":", "break", "cd", "command", "continue", "eval", "exec", "exit", "export", "read", "readonly", "return",
    "set", "shift", "source", "times", "trap", "type", "ulimit", "umask", "unset", "wait",
    "if", "for", "while", "until", "case",
])
# fmt: on


def argv_of(command: Sequence[str], python: str) -> tuple[str, ...]:
    """The words to execute for a command.

    `command`: the command: one string, or several words. `python`: the interpreter to run if the first word is `python`
    or `python3`. In a shell command, and after words such as `env` or `timeout`, the shell finds `python` on PATH,
    where the launcher puts `shim(python)`.
    """
    words = _split(command[0]) if len(command) == 1 else list(command)
    if not words or not words[0]:
        raise LaunchError("the command is empty; put it last: launch.py -n 2 python train.py")
    if words[0] in PYTHONS:
        words[0] = python
    return tuple(words)


def require_program(command: Sequence[str]) -> None:
    """Raise ``LaunchError`` if a command is a Python that reads its program from its standard input.

    The standard input of several workers is /dev/null, so each would run an empty program, and the job would succeed.
    """
    words = _split(command[0]) if len(command) == 1 else list(command)
    while words and PurePath(words[0]).name in _BEFORE_PROGRAMS:
        words = words[1:]
        # Up to the interpreter: options and values of env, timeout and so on.
        while words and not _PYTHON.fullmatch(PurePath(words[0]).name):
            if "/" in words[0] or words[0].endswith(".py"):
                return
            words = words[1:]
    if not words or not _PYTHON.fullmatch(PurePath(words[0]).name):
        return
    rest = iter(words[1:])
    for word in rest:
        if word == "-":
            break
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, None)
        elif not word.startswith("-") or word.startswith("--") or _ENDS_OPTIONS.match(word):
            return
    raise LaunchError(
        f"{shlex.join(words)} reads its program from the standard input, which workers cannot share: write the program "
        "to a file and name that, as in launch.py -n 2 python train.py; or pass it with python -c"
    )


def module_directories(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The directories in which the Python program of a command looks for modules before it comes to installed ones.

    Returns the directory of its script, or the working directory for `python -m` and `python -c`; then PYTHONPATH. For
    a command without any of these, PYTHONPATH alone.
    """
    words = list(command)
    if len(words) == 1:
        try:
            words = shlex.split(words[0])
        except ValueError:
            words = []
    first: list[str] = []
    for word in words:
        if word in ("-m", "-c"):
            first = ["."]
            break
        if word.endswith(".py"):
            first = [str(PurePath(word).parent)]
            break
    return [*first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]


def shim(python: str) -> str:
    """A script that runs an interpreter, which would not find its virtual environment through a symbolic link."""
    return f'#!{SHELL}\nexec {shlex.quote(python)} "$@"\n'


def _split(text: str) -> list[str]:
    if _META.intersection(text) or _ASSIGNMENT.match(text):
        return [SHELL, "-c", text]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"the quotes of the command do not match ({str(error).lower()}): {text}") from None
    return [SHELL, "-c", text] if words and words[0] in _BUILTINS else words


PROGRAM = (
    'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; '
    "sys.path[:] = {first}[p for p in sys.path if p and p not in user] + user; "
    "from {module} import main; sys.exit(main())"
)


def agent_argv(python: str, source_root: str | None = None) -> list[str]:
    """The words that start an agent."""
    return program_argv(python, "launcher.agents.main", source_root)


def program_argv(python: str, module: str, source_root: str | None = None) -> list[str]:
    """The words that execute the `main` of a module of the project.

    They do not use `-m`, which would import a directory called launcher in the working directory, nor `-P`, which
    Python 3.10 does not know. The directories of PYTHONPATH come last, because modules of the user's may have the names
    of ours. (`our_module` sees to that on this host; on another one, only the interpreter there knows where it is.)

    Args:
        source_root: the directory of the packages, if they are not installed. It comes first: another version may be.
    """
    first = "" if source_root is None else f"[{source_root!r}] + "
    return [python, "-c", PROGRAM.format(first=first, module=module)]


IN_SCRIPTS = ("kvstore", "workers")  # what training scripts import


class Shadow(NamedTuple):
    """A module that hides a package of the project. `ours`: the directory of the package."""

    name: str
    theirs: Path
    ours: Path

    def __str__(self) -> str:
        return (
            f"`import {self.name}` takes {self.theirs}, which hides the package {self.ours}; "
            "rename the file, unless that is meant"
        )


def shadows(directories: Iterable[str], names: Iterable[str] = IN_SCRIPTS) -> list[Shadow]:
    """The modules that hide packages of the project.

    `directories`: the directories in which Python looks before it comes to the project's.
    """
    found = []
    path = list(directories)
    for name in names:
        spec = PathFinder.find_spec(name, path)
        if spec is None or not spec.has_location or spec.origin is None:
            continue  # a folder without __init__.py hides nothing
        theirs, ours = Path(spec.origin).absolute(), Path(ROOT, name)
        if theirs.resolve().parent != ours:
            found.append(Shadow(name, theirs, ours))
    return found
