"""A stand-in for a notebook: cells are executed in a `__main__` that cannot be imported, and their source is kept."""

from __future__ import annotations

import ast
import codeop
import io
import linecache
import pickle
import sys
import textwrap
import types
from typing import Any

import pytest

from launcher.calls.handover import CallPickler, Recipe, of_main
from launcher.calls.work import take


class Notebook:
    """Executes cells, and carries values over to a worker's `__main__`, through a recipe and a pickle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
        self._count = 0
        self._compile = codeop.Compile()  # keeps `from __future__ import annotations`, as IPython's does

    def cell(self, text: str, *, whole: bool = False) -> dict[str, Any]:
        """Execute a cell, compiled statement by statement as IPython does, or whole; return the names of `__main__`."""
        self._count += 1
        text, name = textwrap.dedent(text), f"<cell {self._count}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        body = ast.parse(text).body
        for part in [body] if whole else [[statement] for statement in body]:
            exec(self._compile(ast.Module(part, []), name, "exec"), vars(self.main))  # type: ignore[arg-type]
        return vars(self.main)

    def carry(self, value: Any) -> Any:
        """What a worker gets for a value. From then on `__main__` is the worker's."""
        recipe = Recipe(of_main)
        recipe.add(value)
        file = io.BytesIO()
        pickler = CallPickler(file)
        for step in [*recipe.steps, value]:
            pickler.dump(step)
        self._patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        file.seek(0)
        unpickler = pickle.Unpickler(file)
        for _ in recipe.steps:
            take(unpickler.load())
        return unpickler.load()
