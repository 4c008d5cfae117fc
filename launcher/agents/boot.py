"""How to start our programs with an interpreter, wherever that is. Pure."""

from __future__ import annotations

_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]{more}; from {module} import main; sys.exit(main())"


def argv(python: str, source_root: str | None = None) -> list[str]:
    """The words that start an agent; see `run`."""
    return run(python, "launcher.agents.main", source_root)


def run(python: str, module: str, source_root: str | None = None) -> list[str]:
    """The words that execute the `main` of a module of ours.

    Not by -m, which would take a folder called launcher in the home directory for ours, nor `-P`, which
    not every Python knows.

    Args:
        python: the interpreter.
        module: whose `main` it is.
        source_root: where the packages are, if they are not installed.
    """
    more = "" if source_root is None else f" + [{source_root!r}]"
    return [python, "-c", _CODE.format(more=more, module=module)]
