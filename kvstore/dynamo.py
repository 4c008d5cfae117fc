"""What ``torch.compile`` is told of our calls: to break its graph, and run the call as it is. Imports no torch.

Dynamo, its tracer, would otherwise trace into a call, with tensors without values where we hand memory to numpy or to
a socket. ``torch.compiler.disable`` says the same, but imports Dynamo with the first call (1.5 s and 75 MB that
a program without ``torch.compile`` does not need), and costs some 3 µs with each one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

T = TypeVar("T")

REASON = "calls of torch-kvstore are not compiled: they work with memory and sockets, not with tensors alone"
NOT_CALLED = {"__init_subclass__", "__class_getitem__", "__new__"}
OURS = ("kvstore", "workers", "launcher")

_unmarked: list[CodeType] = []  # of functions that were decorated before torch was imported


def outside_graphs(target: T) -> T:
    """Decorator of functions, and of classes: of their public methods and properties, inherited ones of ours too.

    A call from a compiled function breaks the graph. The call and all that it calls run uncompiled. Elsewhere it costs
    nothing: no function is wrapped.
    """
    if isinstance(target, type) and issubclass(target, tuple | BaseException):
        return target  # their methods are Python's own, and share their code with those of all other such classes
    for function in _methods(target) if isinstance(target, type) else [target]:
        _mark(function)
    return target


def mark_early() -> None:
    """Mark what was decorated before torch was imported. Called where kvstore begins to import torch."""
    while _unmarked:
        _skip(_unmarked.pop())


def _methods(cls: type) -> Iterator[Any]:
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] not in OURS and owner is not cls:
            continue
        for name, member in vars(owner).items():
            if (name.startswith("_") and not name.endswith("__")) or name in NOT_CALLED:
                continue
            if isinstance(member, property):
                yield from (each for each in (member.fget, member.fset) if each is not None)
            elif isinstance(member, staticmethod | classmethod):
                yield member.__func__
            elif isinstance(member, FunctionType):
                yield member


def _mark(target: Any) -> None:
    function: Any = target.__func__ if isinstance(target, MethodType) else target
    # What tracing looks at; torch.compiler.disable sets the same.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = REASON
    # Dynamo looks at the code object when the frame of the call begins, after the break. Of a function that a decorator
    # such as contextmanager has wrapped, the inner code is marked: all functions so wrapped share the outer code.
    code = inspect.unwrap(function).__code__
    if "torch" in sys.modules:
        _skip(code)
    else:
        _unmarked.append(code)


def _skip(code: CodeType) -> None:
    """Let Dynamo leave alone frames of ``code``, and the frames below them."""
    import torch

    eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(eval_frame, "_FrameExecStrategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    elif hasattr(eval_frame, "skip_code"):  # older versions of torch compile functions below the frame where they can
        eval_frame.skip_code(code)
