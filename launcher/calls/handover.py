"""Hands a call to the workers: it is pickled once, and each worker is a process of multiprocessing that makes it."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from typing import Any

from launcher.calls import memory, outcome
from launcher.calls.outcome import Outcome
from launcher.calls.pickler import CallPickler, of_main, preparation
from launcher.calls.recipe import Recipe
from launcher.calls.work import WHERE, work
from launcher.errors import LaunchError


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
        self._fds.append(memory.make())
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
