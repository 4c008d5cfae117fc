"""What a call needs of the caller's `__main__` where workers cannot import that: in a notebook, for one.

A worker gets functions and classes by source, modules by name, and other values by pickle. It gets every name that the
code of the call uses, and every name that the code behind those names uses in turn.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from launcher.calls import sources
from launcher.calls.main_module import Adjusted, Defined, Imported, Step, Valued
from launcher.errors import LaunchError

# Values of these types may be set again in a class without side effects.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset)
_OPTIMIZED = inspect.CO_OPTIMIZED  # code of a function, not of a class or module
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


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
