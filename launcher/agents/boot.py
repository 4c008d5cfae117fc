"""The words that start the project's programs with an interpreter. No I/O."""

from __future__ import annotations

CODE = (
    'import os, sys; user = [os.path.abspath(p) for p in os.getenv("PYTHONPATH", "").split(":") if p]; '
    "sys.path[:] = {first}[p for p in sys.path if p and p not in user] + user; "
    "from {module} import main; sys.exit(main())"
)


def argv(python: str, source_root: str | None = None) -> list[str]:
    """The words that start an agent; see `run`."""
    return run(python, "launcher.agents.main", source_root)


def run(python: str, module: str, source_root: str | None = None) -> list[str]:
    """The words that execute the `main` of a module of the project.

    They do not use `-m`, which would import a directory called launcher in the working directory, nor `-P`, which
    Python 3.10 does not know. The directories of PYTHONPATH come last, because modules of the user's may have the names
    of ours. (`our_module` sees to that on this host; on another one, only the interpreter there knows where it is.)

    Args:
        python: the interpreter.
        module: the module.
        source_root: the directory of the packages, if they are not installed. It comes first: another version may be.
    """
    first = "" if source_root is None else f"[{source_root!r}] + "
    return [python, "-c", CODE.format(first=first, module=module)]
