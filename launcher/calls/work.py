"""What a worker of `launcher.run` does: it takes the steps of a recipe, and makes one call.

Each step is a plain record. The caller writes them in order (`handover.Recipe`), and the worker takes them in that
order. Values in later steps and in the call may be of classes that earlier steps define.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import linecache
import os
import pickle
import sys
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from launcher.calls import outcome

WHERE = 'define it at the top of a module, or of the script above its `if __name__ == "__main__":`'


class Imported(NamedTuple):
    """A name is a module.

    Args:
        name: the name in `__main__`.
        module: the module.
        submodules: the modules in it that the code reaches through it.
    """

    name: str
    module: str
    submodules: tuple[str, ...] = ()

    def take(self, namespace: dict[str, Any]) -> None:
        """Import it."""
        namespace[self.name] = importlib.import_module(self.module)
        for submodule in self.submodules:
            importlib.import_module(submodule)


class Defined(NamedTuple):
    """A name is what a statement defines: a function, a class, or a lambda.

    Args:
        name: the name in `__main__`.
        source: the cell or file with the statement.
        filename: what tracebacks call it.
        line: the line of the statement.
        postponed: whether annotations stay text, as by `from __future__ import annotations`.
    """

    name: str
    source: str
    filename: str
    line: int
    postponed: bool = False

    def code(self) -> Any:
        """The code of this one statement, with the lines that it has in its cell.

        Raises:
            LookupError: there is no such statement.
        """
        flags = __future__.annotations.compiler_flag if self.postponed else 0
        module = ast.Module([self.statement()], [])
        return compile(module, self.filename, "exec", flags, dont_inherit=True)

    def statement(self) -> ast.stmt:
        """The statement.

        Raises:
            LookupError: there is none.
        """
        for statement in statements(ast.parse(self.source, self.filename)):
            if first_line(statement) == self.line and self.name in names_bound(statement):
                return statement
        raise LookupError(f"{self.filename} does not define {self.name} in line {self.line}")

    def take(self, namespace: dict[str, Any]) -> None:
        """Execute the statement. Tracebacks show the lines of its cell."""
        if not Path(self.filename).is_file():
            lines = self.source.splitlines(keepends=True)
            linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)
        exec(self.code(), namespace)  # noqa: S102 (from our parent, by inheritance)


class Adjusted(NamedTuple):
    """A function or class has other attributes than its statement gives it: defaults as they were, values set since.

    Args:
        name: the name in `__main__`.
        attributes: the attributes.
    """

    name: str
    attributes: dict[str, Any]

    def take(self, namespace: dict[str, Any]) -> None:
        """Set them, on the function itself if a decorator has wrapped it."""
        target = inspect.unwrap(namespace[self.name])
        for attribute, value in self.attributes.items():
            setattr(target, attribute, value)


class Valued(NamedTuple):
    """A name has a value."""

    name: str
    value: Any

    def take(self, namespace: dict[str, Any]) -> None:
        """Set it."""
        namespace[self.name] = self.value


Step = Imported | Defined | Adjusted | Valued


def take(step: Step) -> None:
    """Take a step in this process."""
    step.take(vars(sys.modules["__main__"]))


def named(name: str) -> Any:
    """The object of that name in `__main__`, whatever it calls itself. A lambda is pickled as a call of this."""
    return reduce(getattr, name.split("."), sys.modules["__main__"])


def statements(tree: ast.AST) -> list[ast.stmt]:
    """The statements that bind names of a module, also in `if`, `try` and `with`, but not in functions and classes."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            found += statements(node)
    return found


def names_bound(statement: ast.stmt) -> list[str]:
    """The names that a definition binds: by `def`, by `class`, or as in `Point = namedtuple("Point", "x y")`."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, (ast.Lambda, ast.Call)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def first_line(statement: ast.stmt) -> int:
    """The first line of a statement: that of its first decorator, if it has any."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def work(call: int, result: int) -> None:
    """Make the call, and write its outcome.

    Args:
        call: the memory with the call: the name of the function, the function, and its arguments.
        result: the memory for the outcome.
    """
    for fd in (call, result):
        os.set_inheritable(fd, False)
    outcome.begin(result)
    with outcome.view_memory(call) as pages:
        name = pickle.load(pages)  # noqa: S301 (from our parent, by inheritance)
        try:
            unpickler = pickle.Unpickler(pages)  # noqa: S301 (likewise)
            while isinstance(loaded := unpickler.load(), Step):
                take(loaded)
            function, args, kwargs = loaded
        except Exception as error:
            _fail(result, error, f"could not load {name} or its arguments; {WHERE}")
    try:
        value = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    except BaseException as error:
        error.__traceback__ = (
            error.__traceback__ and error.__traceback__.tb_next
        )  # the traceback begins in the user's code
        _fail(result, error)
    try:
        outcome.put_value(result, value)
    except Exception as error:
        where = outcome.culprit("result", value, pickle.dumps)
        _fail(result, error, f"returned a {type(value).__name__} that cannot be pickled: {where}")


def _fail(result: int, error: BaseException, how: str | None = None) -> NoReturn:
    outcome.put_error(result, error, how)
    sys.last_value = (
        error  # as after an exception that ends a script: at exit, the store reports it to the other members
    )
    sys.exit(1)
