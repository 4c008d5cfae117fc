"""Hands a call to the workers: it is pickled once, and each worker is a process of multiprocessing that makes it.

Workers import the caller's script, and so find its functions by name. A notebook cannot be imported: cloudpickle sends
its functions and classes by value, with the names that they use.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import io
import linecache
import marshal
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

import cloudpickle

from launcher.calls import outcome
from launcher.calls.outcome import Outcome, Surroundings, work
from launcher.errors import LaunchError

IPYTHON = ".ipy"  # scripts with IPython's %magics, which only IPython can execute


# Loading a pickle executes what its writer likes. So this one goes only into memory without a name, which workers
# inherit from the process that has written it: no file, no socket, and never to another host.
class CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a call, with functions of a notebook by value.

    Attributes:
        surroundings: what the functions that went by value find in their notebook, to be pickled last.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.surroundings = Surroundings({}, {}, {})
        self._imported = can_import_main()
        reductions = {
            **cloudpickle.Pickler.dispatch_table,
            **reduction.ForkingPickler(file).dispatch_table,  # queues and locks of multiprocessing
            # cloudpickle forgets the file of a code object, so a traceback could not show the line of the cell. marshal
            # is for one version of Python only, and here both ends are the same interpreter.
            types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),)),
            functools._lru_cache_wrapper: self._reduce_cached,
            functools.cached_property: lambda value: (_cached_property, (value.func, value.attrname)),
        }
        del reductions[io.TextIOWrapper]  # cloudpickle would copy the whole content of an open file
        # With torch's reductions, all workers and the caller would share a tensor's memory, and would train one model.
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in reductions.items()
            if not str(getattr(reduce, "__module__", "")).startswith("torch.multiprocessing")
        }
        super().__init__(file, pickle.HIGHEST_PROTOCOL)  # last: it looks at the table here, and no more

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (types.FunctionType, type)):
            if value.__module__ == "__main__":
                if _is_named(value):
                    if self._imported:
                        return NotImplemented  # by its name: cloudpickle takes every `__main__` for a notebook
                    # A worker that pickles, as for its result, looks for the name in its own `__main__`. So results
                    # come back by name: cloudpickle would give the caller's class all attributes of the worker's.
                    if value.__qualname__.isidentifier():
                        self.surroundings.names[value.__qualname__] = value
                if isinstance(value, types.FunctionType):
                    self._note(value)
        elif isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            # cloudpickle copies modules whose class is derived from ModuleType, as torch._dynamo.config.
            return importlib.import_module, (value.__name__,)
        elif type(value).__name__.endswith("ExitAutocall"):
            return getattr, (sys, "exit")  # IPython's `exit` and `quit` refer to the whole notebook
        return super().reducer_override(value)

    def _note(self, function: types.FunctionType) -> None:
        """Note what the code of a function needs beside its global names."""
        for code in _codes(function.__code__):
            if "get_ipython" in code.co_names:
                raise refusal(function.__qualname__, "it has a %magic or a !command, which only a notebook knows")
            for name in code.co_names:
                added = getattr(builtins, name, None)
                if isinstance(added, types.FunctionType):  # Python's are not written in Python: IPython's `display`
                    self.surroundings.builtins[name] = added
            entry = linecache.cache.get(code.co_filename, ())
            if len(entry) > 1 and entry[1] is None:  # source without a file
                self.surroundings.sources[code.co_filename] = entry

    def _reduce_cached(self, value: Any) -> Any:
        if self._imported or value.__module__ != "__main__":
            return value.__reduce__()
        return _cached, (value.__wrapped__, value.cache_parameters())


def _is_named(value: Any) -> bool:
    """Whether `__main__` has a function or class under its own name: `train`, `Net.Part`."""
    found: Any = sys.modules["__main__"]
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Callable[[Any], Any], name: str) -> Any:
    value = functools.cached_property(function)
    value.__set_name__(object, name)
    return value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def preparation(name: str) -> dict[str, object]:
    """The data of multiprocessing for a new process: paths, and the script to import."""
    data = spawn.get_preparation_data(name)
    # What functions go by value, and whether the script is imported, must agree: with both, a worker would have each
    # class twice, and `isinstance` would be false between them.
    if not can_import_main():
        for key in ("init_main_from_name", "init_main_from_path"):
            data.pop(key, None)
    return data


def can_import_main() -> bool:
    """Whether a new process of multiprocessing can import this `__main__`, and finds all of it there."""
    if hasattr(sys, "ps1"):
        return False  # more can be typed than the script defines
    data = spawn.get_preparation_data("")
    name, path = data.get("init_main_from_name"), data.get("init_main_from_path")
    if name is not None:
        return not f".{name}".endswith(".__main__")  # multiprocessing leaves these out, and `ipython`
    return (
        path is not None and Path(str(path)).is_file() and Path(path).stem != "ipython" and Path(path).suffix != IPYTHON
    )


def refusal(what: str, why: object) -> LaunchError:
    """The error for what cannot be given to the workers, with the way that always works."""
    name = what if what.isidentifier() else "train"
    if "IPython" in sys.modules:
        how = f"begin its cell with `%%writefile train.py`, and in the next cell run `from train import {name}`"
    else:
        how = f"put it into a file train.py, and run `from train import {name}`"
    return LaunchError(f"workers cannot get {what} from this session: {why}. A module always works: {how}")


def _dump(value: object) -> None:
    CallPickler(io.BytesIO()).dump(value)


def _blame(value: Any, seen: tuple[object, ...] = ()) -> LaunchError | None:
    """The error for a function or class that uses what cannot be pickled, or whose functions do."""
    users: list[Any] = []
    for name, part in _uses(value):
        if any(part is other for other in (value, *seen)) or isinstance(part, types.GetSetDescriptorType):
            continue
        try:
            _dump(part)
        except Exception as error:
            if _uses(part):
                users.append(part)
                continue
            text = f"it uses {name}, a {type(part).__name__} that cannot be pickled ({type(error).__name__}: {error})"
            title = _inner(value).__qualname__
            return refusal(title, f"{text}; make it inside {title}")
    return next(filter(None, (_blame(user, (value, *seen)) for user in users)), None)


def _uses(value: Any) -> list[tuple[str, Any]]:
    """What a class has, or what a function uses: global names, closure variables and defaults; nothing for others."""
    if isinstance(value, type):
        return list(vars(value).items())
    function = _inner(value)
    if not isinstance(function, types.FunctionType):
        return []
    found = {name: function.__globals__.get(name) for code in _codes(function.__code__) for name in code.co_names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            found[name] = cell.cell_contents
    defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    return [*found.items(), *defaults.items()]


def _inner(value: Any) -> Any:
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return value if isinstance(value, types.FunctionType) else inspect.unwrap(value)


@dataclass
class WorkerStart:
    """How to start one worker."""

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...]  # the file descriptors that it inherits
    reader: int  # the pipe from which the worker reads the data of multiprocessing; to be closed once it runs
    writer: int  # the other end, to write `data` to. It stays open: its end tells the worker that its parent is dead
    data: bytes = field(repr=False)  # the data that has not been written


class Handover:
    """Carries a call to every worker, and its outcome back. Each worker gets a copy of the arguments."""

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
        """The outcome of a worker's call. Raises Exception: it cannot be unpickled here."""
        return outcome.get(self._results[rank])

    def close(self) -> None:
        """Close the memory and the pipes. May be called again."""
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())

    def started(self) -> None:
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
                pickler = CallPickler(file)
                pickler.dump((function, args, kwargs, pickler.surroundings))
        except LaunchError:
            raise
        except Exception as error:
            where, part = self._culprit(function, args, kwargs)
            text = f"{type(error).__name__}: {error}"
            raise _blame(part) or LaunchError(
                f"cannot hand {where} to the workers ({text}); functions, arguments and results must be picklable"
            ) from None
        finally:
            set_spawning_popen(None)

    def _culprit(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, object]:
        for name, part in (("args", args), ("kwargs", kwargs)):
            try:
                _dump(part)
            except Exception:
                return outcome.culprit(name, part, _dump)
        return f"{self.name} itself", function

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
