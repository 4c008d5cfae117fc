"""Pickles a call and its values for the workers, and finds what of `__main__` they cannot import."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from contextlib import suppress
from multiprocessing import reduction, spawn
from pathlib import Path
from typing import IO, Any

from launcher.calls import sources
from launcher.calls.main_module import named

IPYTHON = ".ipy"  # scripts with IPython's %magics, which only IPython can execute


class CallPickler(reduction.ForkingPickler):
    """The pickler of multiprocessing without torch's reductions. It takes lambdas of `__main__` that have a name.

    With torch's reductions all workers and the caller would share the memory of a tensor, and so would all train the
    same model.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in self.dispatch_table.items()
            if not str(getattr(reduce, "__module__", "")).startswith("torch.multiprocessing")
        }

    def reducer_override(self, value: Any) -> Any:
        """Pickle a lambda of `__main__` by the name that it is bound to."""
        if sources.is_of_main(value) and "<lambda>" in sources.title(value):
            with suppress(LookupError):
                return named, (sources.name_of(value),)
        return NotImplemented


class _Finder(CallPickler):
    """Finds the functions and classes of `__main__` in a value."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.found: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Note a function or class of `__main__`, and go on."""
        if sources.is_of_main(value):
            self.found.append(value)
            return str, ()
        return NotImplemented


def of_main(value: object) -> list[Any]:
    """The functions and classes in a value that a worker cannot import with the script."""
    if _can_import_main() and not hasattr(sys, "ps1"):
        return []
    with Path(os.devnull).open("wb") as nowhere:
        finder = _Finder(nowhere)
        finder.dump(value)
    return [item for item in finder.found if not _is_imported(item)]


def _is_imported(value: Any) -> bool:
    """Whether a worker has it when it has imported the script: what was typed after `python -i` it has not."""
    if not _can_import_main():
        return False
    code = getattr(inspect.unwrap(value), "__code__", None)
    return code is None or not code.co_filename.startswith("<")


def preparation(name: str) -> dict[str, object]:
    """The data of multiprocessing for a new process: paths, and the script to import."""
    data = spawn.get_preparation_data(name)
    path = data.get("init_main_from_path")
    if path is not None and (not Path(str(path)).is_file() or Path(str(path)).suffix == IPYTHON):
        del data["init_main_from_path"]  # "<stdin>", or no Python
    return data


def _can_import_main() -> bool:
    """Whether a new process of multiprocessing can import this `__main__`."""
    data = preparation("")
    name, path = data.get("init_main_from_name"), data.get("init_main_from_path")
    if name is not None:
        return not f".{name}".endswith(".__main__")
    return path is not None and Path(str(path)).stem != "ipython"
