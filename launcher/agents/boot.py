"""The words that start the project's programs with an interpreter. No I/O."""

from __future__ import annotations

CODE = "import sys; sys.path[:] = [p for p in sys.path if p]{more}; from {module} import main; sys.exit(main())"


def argv(python: str, source_root: str | None = None) -> list[str]:
    """The words that start an agent; see `run`."""
    return run(python, "launcher.agents.main", source_root)


def run(python: str, module: str, source_root: str | None = None) -> list[str]:
    """The words that execute the `main` of a module of the project.

    They do not use `-m`, which would import a directory called launcher in the working directory, nor `-P`, which
    Python 3.10 does not know.

    Args:
        python: the interpreter.
        module: the module.
        source_root: the directory of the packages, if they are not installed.
    """
    more = "" if source_root is None else f" + [{source_root!r}]"
    return [python, "-c", CODE.format(more=more, module=module)]
