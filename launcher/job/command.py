"""The user's command, turned into the words that are executed. Pure.

A command comes as separate words, which are executed as they are, or as one string. A string goes to the shell only if
it needs one: without it there is a process less to signal, and the exit status is the program's own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from launcher.errors import LaunchError

SHELL = "/bin/sh"
PYTHONS = ("python", "python3")

# Anything the shell would act upon. Inside quotes these are harmless, and the shell gets them right as well.
_META = frozenset("|&;<>()$`*?[]{}!#~\n\r")
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_]*=")
# Commands that exist only inside a shell, so that "exit 7" means what it says.
# fmt: off
_BUILTINS = frozenset([
    ".", ":", "break", "cd", "command", "continue", "eval", "exec", "exit", "export", "read", "readonly", "return",
    "set", "shift", "source", "times", "trap", "type", "ulimit", "umask", "unset", "wait",
    "if", "for", "while", "until", "case",
])
# fmt: on


def argv_of(command: Sequence[str], python: str) -> tuple[str, ...]:
    """The words to execute for `command`, where `python` as its first word is the interpreter of that path.

    Inside a shell string, and behind words such as `env` or `timeout`, `python` is found on PATH instead; the launcher
    puts `shim(python)` there.

    Raises:
        LaunchError: the command is empty, or a string whose quotes do not match.
    """
    words = _split(command[0]) if len(command) == 1 else list(command)
    if not words or not words[0]:
        raise LaunchError("the command is empty; put it last: launch.py -n 2 python train.py")
    if words[0] in PYTHONS:
        words[0] = python
    return tuple(words)


def shim(python: str) -> str:
    """A script that is `python`. A symbolic link would not do: it would hide the virtual environment from it."""
    return f'#!{SHELL}\nexec {shlex.quote(python)} "$@"\n'


def _split(text: str) -> list[str]:
    if _META.intersection(text) or _ASSIGNMENT.match(text):
        return [SHELL, "-c", text]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"the quotes of the command do not match ({str(error).lower()}): {text}") from None
    return [SHELL, "-c", text] if words and words[0] in _BUILTINS else words
