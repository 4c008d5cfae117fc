from __future__ import annotations

import linecache
import sys
import traceback
import types
from typing import Any

import pytest

from launcher.calls.main_module import Adjusted, Defined, Imported, Valued, named, take


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    return module


def test_each_step(main: Any) -> None:
    take(Imported("p", "os.path"))
    take(Valued("n", 3))
    take(Defined("add", "n = 0\nadd = lambda x, y=2: x + y + n\n", "<cell>", 2))
    take(Adjusted("add", {"__defaults__": (10,)}))
    assert main.p.join("a", "b") == "a/b"
    assert main.add(1) == 14  # of the cell that statement alone was executed
    assert named("add") is main.add
    assert named("p.join") is main.p.join


def test_a_traceback_shows_the_line_of_the_cell(main: Any) -> None:
    take(Defined("fail", "import os\n\ndef fail():\n    raise ValueError('no data')\n", "<cell>", 3))
    with pytest.raises(ValueError, match="no data") as caught:
        main.fail()
    lines = "".join(traceback.format_exception(caught.value))
    assert "File \"<cell>\", line 4, in fail\n    raise ValueError('no data')" in lines


def test_a_definition_that_is_not_there(main: Any) -> None:
    with pytest.raises(LookupError, match="<cell> does not define train in line 2"):
        take(Defined("train", "def train(): pass\n", "<cell>", 2))
