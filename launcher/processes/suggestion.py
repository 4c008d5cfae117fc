"""What the user may have meant by a command that cannot be executed."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.job.command import PYTHONS

_CLOSE = 0.75  # of difflib's ratio: `pyhton` is 0.83 from `python`
_LONGEST = 100  # characters of a command that are shown


def suggestion(argv: Sequence[str], search_path: str, directory: str = ".") -> str:
    """The command that the user may have meant; empty if there is no guess.

    Args:
        argv: the words of the command.
        search_path: the PATH on which its program is looked up.
        directory: the working directory of the command.
    """
    program = argv[0]
    if _is_script(Path(directory) / program):
        return _shown([PYTHONS[0], *argv])
    if os.sep in program or " " in program:
        return ""
    # Python goes first: of names that are equally close, it is the likeliest.
    names = [*PYTHONS, *sorted(_programs(search_path))]
    close = difflib.get_close_matches(program, names, n=1, cutoff=_CLOSE)
    return _shown([*close, *argv[1:]]) if close else ""


def _is_script(path: Path) -> bool:
    """Whether it is a file for Python that was not made executable."""
    return path.suffix == ".py" and path.is_file()


def _programs(search_path: str) -> set[str]:
    names: set[str] = set()
    for directory in search_path.split(os.pathsep):
        with suppress(OSError), os.scandir(directory or ".") as entries:
            names.update(entry.name for entry in entries if os.access(entry.path, os.X_OK))
    return names


def _shown(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
