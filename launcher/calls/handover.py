"""Hands a call to the workers: it is pickled once, and each worker is a process of multiprocessing that makes it.

Where workers cannot import the caller's `__main__`, as in a notebook, a recipe goes before the call: the imports,
definitions and values that the call needs of it.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import io
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import IO, Any

from launcher.calls import outcome, sources
from launcher.calls.outcome import Outcome
from launcher.calls.work import WHERE, Adjusted, Defined, Imported, Step, Valued, named, work
from launcher.errors import LaunchError

# Values of these types may be set again in a class without side effects.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset)
_OPTIMIZED = inspect.CO_OPTIMIZED  # code of a function, not of a class or module
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


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


class Recipe:
    """The steps by which a worker makes its own `__main__` fit for a call.

    Args:
        needed: finds the functions and classes of `__main__` that pickling a value comes to. It raises what pickling
            raises.

    Attributes:
        steps: the steps, in order.
    """

    def __init__(self, needed: Callable[[object], list[Any]]) -> None:
        self.steps: list[Step] = []
        self._needed = needed
        self._seen: dict[str, object] = {}

    def add(self, value: object) -> None:
        """Add what a value needs.

        Raises:
            LaunchError: a name cannot be given to the workers. The message names it, and says what to do.
            Exception: the value cannot be pickled.
        """
        for item in self._needed(value):
            title = sources.title(item)
            try:
                name = sources.name_of(item).split(".")[0]
            except LookupError as error:
                raise refusal(title, error) from None
            self._name(name, sources.namespace_of(item)[name], title)

    def _name(self, name: str, value: Any, user: str, chains: frozenset[str] = frozenset()) -> None:
        if isinstance(value, types.ModuleType):
            self._seen[name] = value
            self.steps.append(Imported(name, value.__name__, _submodules(name, value, chains)))
            return
        if name in self._seen:
            if self._seen[name] is not value:
                raise refusal(user, f"it uses a name, {name}, that stands for something else elsewhere")
            return
        if name == "get_ipython":
            raise refusal(user, "it has a %magic or a !command, which only a notebook knows")
        self._seen[name] = value
        if sources.is_of_main(value) and _own_name(value) == name:
            self._define(name, value)
            return
        try:
            self.add(value)
        except LaunchError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise refusal(
                user, f"it uses {name}, a {type(value).__name__} that cannot be pickled ({text}); make it inside {user}"
            ) from None
        self.steps.append(Valued(name, value))

    def _define(self, name: str, value: Any) -> None:
        try:
            defined = sources.definition(name, value)
        except LookupError as error:
            raise refusal(name, error) from None
        namespace = {**_added_builtins(), **sources.namespace_of(value)}
        chains = _chains(defined.statement())
        used = dict.fromkeys(_names(defined.code()))
        for at_once in (True, False):
            for other, first in used:
                if first == at_once and other in namespace and not _is_builtin(other, namespace[other]):
                    self._name(other, namespace[other], name, chains)
            if at_once:
                self.steps.append(defined)
                self._adjust(defined, value)

    def _adjust(self, defined: Defined, value: Any) -> None:
        function = inspect.unwrap(value)
        if isinstance(value, type):
            given = {key: other for key, other in vars(value).items() if type(other) in _PLAIN and key[:1] != "_"}
        elif isinstance(function, types.FunctionType) and (function.__defaults__ or function.__kwdefaults__):
            given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        else:
            return
        if given:
            try:
                self.add(given)
            except LaunchError:
                raise
            except Exception as error:
                raise refusal(defined.name, f"{type(error).__name__}: {error}") from None
            self.steps.append(Adjusted(defined.name, given))


def refusal(what: str, why: object) -> LaunchError:
    """The error for what cannot be given to the workers, with the way that always works."""
    name = what if what.isidentifier() else "train"
    if "IPython" in sys.modules:
        how = f"begin its cell with `%%writefile train.py`, and in the next cell run `from train import {name}`"
    else:
        how = f"put it into a file train.py, and run `from train import {name}`"
    return LaunchError(f"workers cannot get {what} from this session: {why}. A module always works: {how}")


def _own_name(value: Any) -> str:
    try:
        return sources.name_of(value)
    except LookupError:
        return ""


def _is_builtin(name: str, value: object) -> bool:
    """Whether a name stands for the builtin of that name. IPython has an `open` and an `exit` of its own."""
    builtin = getattr(builtins, name, None)
    if builtin is None or name in _added_builtins():
        return False
    its_module = str(getattr(type(value), "__module__", ""))
    return value is builtin or inspect.unwrap(value) is builtin or its_module.startswith(("IPython", "ipykernel"))  # type: ignore[arg-type]


def _added_builtins() -> dict[str, Any]:
    """Functions among the builtins that are not Python's, which are not written in Python: IPython's `display`."""
    return {name: value for name, value in vars(builtins).items() if isinstance(value, types.FunctionType)}


def _names(code: types.CodeType, at_once: bool = True) -> Iterator[tuple[str, bool]]:
    """The global names that code uses, and whether it does when it is defined. Those of functions come later."""
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            stored.add(instruction.argval)
        elif instruction.opname in _LOADS and instruction.argval not in stored:
            yield instruction.argval, at_once
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            runs = not constant.co_flags & _OPTIMIZED or constant.co_name.startswith("<")
            yield from _names(constant, at_once and runs)


def _chains(statement: ast.stmt) -> frozenset[str]:
    """The dotted names in a statement."""
    return frozenset(ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Attribute))


def _submodules(name: str, module: types.ModuleType, chains: frozenset[str]) -> tuple[str, ...]:
    """The modules in a module that the code reaches through it, as after `import xml.dom.minidom`."""
    found = {module.__name__ + chain[len(name) :] for chain in chains if chain.startswith(f"{name}.")}
    return tuple(sorted(found & sys.modules.keys()))


@dataclass
class WorkerStart:
    """How to start one worker.

    Args:
        argv: the words to execute.
        pass_fds: the file descriptors that it inherits.
        reader: the pipe from which the worker reads the data of multiprocessing; to be closed once it runs.
        writer: the other end, to write `data` to. It stays open: its end tells the worker that its parent is dead.
        data: the data that has not been written.
    """

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...]
    reader: int
    writer: int
    data: bytes = field(repr=False)


class Handover:
    """Carries a call to every worker, and its outcome back.

    Args:
        function: the function to call.
        args, kwargs: its arguments. Each worker gets a copy of them.
        num_workers: the number of workers.

    Raises:
        LaunchError: the call cannot be pickled. The message says which part.
    """

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], num_workers: int
    ) -> None:
        self.name = getattr(function, "__qualname__", None) or repr(function)
        self._inherited = _Inherited()
        self._fds: list[int] = []
        try:
            self._call = self._memory()
            self._results = [self._memory() for _ in range(num_workers)]
            self._write(function, tuple(args), dict(kwargs))
            self.starts = [self._start(rank) for rank in range(num_workers)]
        except BaseException:
            self.close()
            raise

    def outcome(self, rank: int) -> Outcome:
        """The outcome of a worker's call.

        Raises:
            Exception: it cannot be unpickled here.
        """
        return outcome.get(self._results[rank])

    def close(self) -> None:
        """Close the memory and the pipes. May be called again."""
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())

    def started(self) -> None:
        """The workers run: close the descriptors that only they need."""
        for start in self.starts:
            self._fds.remove(start.reader)
            os.close(start.reader)

    def _memory(self) -> int:
        self._fds.append(outcome.make_memory())
        return self._fds[-1]

    def _write(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        set_spawning_popen(self._inherited)
        try:
            with os.fdopen(os.dup(self._call), "w+b") as file:
                pickle.dump(self.name, file, pickle.HIGHEST_PROTOCOL)
                recipe = Recipe(of_main)
                recipe.add((function, args, kwargs))
                pickler = CallPickler(file)  # one for all, so that an object in several steps stays one
                for step in recipe.steps:
                    pickler.dump(step)
                pickler.dump((function, args, kwargs))
        except LaunchError:
            raise
        except Exception as error:
            where = self._culprit(function, args, kwargs)
            text = f"{type(error).__name__}: {error}"
            raise LaunchError(
                f"cannot hand {where} to the workers ({text}); functions, arguments and results must be picklable"
            ) from None
        finally:
            set_spawning_popen(None)

    def _culprit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        dump: Callable[[object], object] = lambda part: CallPickler(io.BytesIO()).dump(part)  # noqa: E731
        try:
            dump(function)
        except Exception:
            return f"{self.name} itself (a function has to have a name in a module: {WHERE})"
        try:
            dump(args)
        except Exception:
            return outcome.culprit("args", args, dump)
        return outcome.culprit("kwargs", kwargs, dump)

    def _start(self, rank: int) -> WorkerStart:
        name = f"worker {rank}"
        # multiprocessing does not start it. It has no start method of its own: the user chooses that of its children.
        process = multiprocessing.Process(target=work, args=(self._call, self._results[rank]), name=name, daemon=False)
        data = io.BytesIO()
        set_spawning_popen(self._inherited)
        try:
            reduction.dump(preparation(name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        # It runs if an argument needs it. Otherwise a worker that needs one starts its own, which ends with the job.
        tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
        reader, writer = os.pipe()
        self._fds += [reader, writer]
        inherited = (reader, tracker, self._call, self._results[rank], *self._inherited.fds)
        words = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reader)
        return WorkerStart(
            argv=tuple(os.fsdecode(word) for word in words),
            pass_fds=tuple(fd for fd in inherited if fd is not None),
            reader=reader,
            writer=writer,
            data=data.getvalue(),
        )


class _Inherited(popen_spawn_posix.Popen):
    """Collects the descriptors to inherit, which multiprocessing asks for while it pickles queues and locks."""

    def __init__(self) -> None:  # nothing is started
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd
