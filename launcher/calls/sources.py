"""The source of functions and classes of `__main__`: from a file, a notebook's cell, or an interactive session's input.

Python keeps the source of cells and, from 3.13 on, of what is typed at its prompt, in `linecache`.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from launcher.calls.work import Defined, first_line, names_bound, statements


def is_of_main(value: object) -> bool:
    """Whether it is a function or class of `__main__`, or what a decorator has made of one."""
    if isinstance(value, types.MethodType) or getattr(value, "__module__", None) != "__main__":
        return False
    return isinstance(value, TypeVar) or isinstance(getattr(value, "__qualname__", None), str)


def title(value: Any) -> str:
    """What a function or class calls itself."""
    return str(getattr(value, "__qualname__", None) or value.__name__)


def namespace_of(value: Any) -> dict[str, Any]:
    """The global names of a function or class."""
    if isinstance(value, type):
        method = next(_methods(value), None)
        return vars(sys.modules["__main__"]) if method is None else method.__globals__
    function = inspect.unwrap(value)
    found: dict[str, Any] = getattr(function, "__globals__", vars(sys.modules["__main__"]))
    return found


def name_of(value: Any) -> str:
    """The name in `__main__` under which workers find a function or class: `train`, `Net`, `Net.helper`.

    Raises:
        LookupError: it has none. The message says why, and what to do.
    """
    name, namespace = title(value), namespace_of(value)
    if "<locals>" in name:
        raise LookupError("it is defined inside a function; define it outside, and pass what it needs as arguments")
    if "<lambda>" in name:
        names = [key for key, other in namespace.items() if other is value]
        if not names:
            raise LookupError("it is a lambda without a name; define a function with `def`")
        return names[0]
    first, *rest = name.split(".")
    found = namespace.get(first)
    for part in rest:
        found = getattr(found, part, None)
    if found is not value:
        raise LookupError(f"the name {name} stands for something else by now; run the cell that defines it again")
    return name


def definition(name: str, value: Any) -> Defined:
    """The statement that has defined a function or class.

    Args:
        name: its name in `__main__`.
        value: the function or class.

    Raises:
        LookupError: its source is not known.
    """
    postponed = namespace_of(value).get("annotations") is __future__.annotations
    for source, filename, line in _places(value):
        for statement in reversed(statements(ast.parse(source))):
            first, last = first_line(statement), statement.end_lineno or statement.lineno
            if name in names_bound(statement) and (line is None or first <= line <= last):
                defined = Defined(name, source, filename, first, postponed)
                _check_current(defined, value)
                return defined
    raise LookupError("Python does not have its source")


def _places(value: Any) -> Iterator[tuple[str, str, int | None]]:
    """Where the statement may be: text, file name, and a line of it if that is known."""
    if isinstance(value, type):
        functions = [method for method in _methods(value) if method.__qualname__.startswith(f"{value.__qualname__}.")]
    else:
        functions = [function for function in [inspect.unwrap(value)] if isinstance(function, types.FunctionType)]
    for function in functions:
        try:
            lines, _ = inspect.findsource(function)
        except (OSError, TypeError):
            continue
        yield "".join(lines), function.__code__.co_filename, function.__code__.co_firstlineno
    if not functions:  # a class without methods does not say where it is from, nor does a type variable
        yield from _cells()


def _cells() -> Iterator[tuple[str, str, None]]:
    """The cells that have run, the latest first; then the script."""
    main = sys.modules["__main__"]
    cells = {"".join(entry[2]): name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
    history = getattr(main, "_ih", None)  # IPython's, in the order of execution
    texts = [*cells, *(str(text) for text in (history if isinstance(history, list) else ()))]
    for text in reversed(texts):
        for source in (text, text + "\n"):
            if source in cells:
                yield source, cells[source], None
    file = getattr(main, "__file__", None)
    if file is not None and Path(file).is_file():
        yield Path(file).read_text(), file, None


def _methods(kind: type) -> Iterator[types.FunctionType]:
    """The functions of a class that have source in `__main__`: not those that a decorator such as dataclass makes."""
    for value in vars(kind).values():
        function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
        if not isinstance(function, types.FunctionType) or function.__module__ != "__main__":
            continue
        if function.__code__.co_filename != "<string>":
            yield function


def _check_current(defined: Defined, value: Any) -> None:
    """Refuse source that is not that of the object: of a file that has changed, or without a method set later."""
    lines = range(defined.line, (defined.statement().end_lineno or defined.line) + 1)
    code = [part for unit in _units(defined) for part in _all_code(unit) if part.co_firstlineno in lines]
    function = inspect.unwrap(value)
    if function is not value and not getattr(defined.statement(), "decorator_list", None):
        raise LookupError("it was wrapped after its `def`; write what wraps it above that, with @")
    if isinstance(value, type):
        functions = list(_methods(value))
    else:
        functions = [function] if isinstance(function, types.FunctionType) else []
    for function in functions:
        if not any(_same(function.__code__, other) for other in code):
            what = f"its method {function.__name__} was set later, or its" if isinstance(value, type) else "its"
            raise LookupError(f"{what} source has changed since it was defined")


def _units(defined: Defined) -> Iterator[types.CodeType]:
    """The code of a definition's source, compiled in each way in which a session may have compiled it.

    Python compiles all of a file at once. IPython and Python's prompt compile each statement of a cell by itself. The
    code differs: a call such as ``np.zeros(2)`` is compiled otherwise where ``import numpy as np`` is seen with it.
    """
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | (__future__.annotations.compiler_flag if defined.postponed else 0)
    whole = ast.parse(defined.source)
    around = [node for node in whole.body if first_line(node) <= defined.line <= (node.end_lineno or node.lineno)]
    for body in (whole.body, around):
        yield compile(ast.Module(body, []), defined.filename, "exec", flags, dont_inherit=True)


def _all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_code(constant)


def _same(code: types.CodeType, other: types.CodeType) -> bool:
    """Whether both are compiled from the same lines. They are not equal to Python once one of them has run often."""
    names = ("co_name", "co_firstlineno", "co_code", "co_names", "co_varnames", "co_freevars")
    if any(getattr(code, name) != getattr(other, name) for name in names) or len(code.co_consts) != len(
        other.co_consts
    ):
        return False
    return all(
        _same(one, two) if isinstance(one, types.CodeType) and isinstance(two, types.CodeType) else one == two
        for one, two in zip(code.co_consts, other.co_consts, strict=True)
    )
