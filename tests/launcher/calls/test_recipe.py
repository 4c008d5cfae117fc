"""What of a notebook's `__main__` reaches a worker, and what an error says of the rest. No processes."""

from __future__ import annotations

import builtins
import sys
import textwrap
from typing import Any

import pytest
from cells import Notebook

from launcher.errors import LaunchError


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


def test_a_function_with_all_that_it_uses(notebook: Notebook) -> None:
    notebook.cell(
        "import functools, math as m\nimport xml.dom.minidom\nfrom os.path import join\n"
        "N, unused = 3, open('/dev/null')"
    )
    notebook.cell("unused.close()\nscale = lambda x: x * N\nTABLE = {'scale': scale}\nother = scale")
    notebook.cell(
        """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def counted(function):
            @functools.wraps(function)
            def count(*args):
                return "counted", function(*args)
            return count
        @counted
        @functools.lru_cache
        def train(x):
            tag = xml.dom.minidom.parseString("<a/>").documentElement.tagName
            return TABLE["scale"](x), other(x), m.pi > 3, join("a", "b"), tag, [even(i) for i in range(N)]
        """
    )
    train = notebook.carry(notebook.main.train)
    assert train is not notebook.main.train
    assert train(2) == ("counted", (6, 6, True, "a/b", "a", [True, False, True]))


def test_a_function_that_ipython_has_added_to_the_builtins(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "display", textwrap.dedent, raising=False)
    notebook.cell("def train(x): return display(x), len(x)")
    notebook.cell("from builtins import display\ndef also(x): return display(x)")
    train, also = notebook.carry([notebook.main.train, notebook.main.also])
    monkeypatch.delattr(builtins, "display")
    assert (train("  x"), also("  x")) == (("x", 3), "x")


def test_classes_and_their_values(notebook: Notebook) -> None:
    notebook.cell("import dataclasses, enum")
    notebook.cell(
        """
        class Odd(Exception): pass
        class Config:
            lr = 0.1
            steps: int = 5
        class Color(enum.Enum):
            RED = 1
        @dataclasses.dataclass
        class Point:
            x: int
            color: Color = Color.RED
        class Base:
            def also(self): return Derived
        class Derived(Base):
            sizes = [Config.steps for _ in range(2)]
            def __init__(self, x):
                super().__init__()
                self.point = Point(x)
            @staticmethod
            def make(): return Derived(7)
        value = Derived(3)
        again = value
        """
    )
    notebook.cell("Config.lr = 0.5\ndef train(): return value is again, value, Config.lr, Odd, Derived.make()")
    carried = notebook.carry((notebook.main.train, notebook.main.Derived.make))
    same, value, rate, odd, made = carried[0]()
    assert (same, value.point.x, rate, made.point.x, value.sizes) == (True, 3, 0.5, 7, [5, 5])
    assert issubclass(odd, Exception)
    assert type(made) is type(value) is value.also() is not notebook.main.Derived
    assert value.point.color is type(value.point).__init__.__globals__["Color"].RED
    assert carried[1]().point.x == 7


def test_classes_that_a_call_makes(notebook: Notebook) -> None:
    notebook.cell(
        """
        import typing, collections, enum
        V = typing.TypeVar("V")
        Point = collections.namedtuple("Point", "x y")
        Color = enum.Enum("Color", "RED GREEN")
        point = Point(1, Color.GREEN)
        def train(x: V) -> V: return point, Color.GREEN, Point
        """
    )
    point, color, kind = notebook.carry((notebook.main.train, [notebook.main.V]))[0](0)
    assert (point.x, point.y is color, type(point) is kind) == (1, True, True)
    assert kind is not notebook.main.Point


def test_objects_that_share_stay_one(notebook: Notebook) -> None:
    """A model and its optimizer are two names; the optimizer must update the model's own weights."""
    notebook.cell(
        "weights = [1, 2]\nmodel, optimizer = {'w': weights}, [weights]\ndef train(): return model, optimizer"
    )
    model, optimizer = notebook.carry(notebook.main.train)()
    assert model["w"] is optimizer[0]
    assert model["w"] is not notebook.main.weights


def test_defaults_are_those_of_the_definition(notebook: Notebook) -> None:
    notebook.cell("N = 1\ndef train(a=N, *, b=N): return a, b, N")
    notebook.cell("N = 2")
    assert notebook.carry(notebook.main.train)() == (1, 1, 2)


def test_the_latest_definition_counts(notebook: Notebook) -> None:
    notebook.cell("class Plain: size = 1\ndef train(): return 'old'")
    notebook.cell("if True:\n    class Plain: other = 2\n    def train(): return Plain.other, hasattr(Plain, 'size')")
    assert notebook.carry(notebook.main.train)() == (2, False)


def test_annotations_that_stay_text(notebook: Notebook) -> None:
    notebook.cell(
        "from __future__ import annotations\nclass Node:\n    def next(self) -> Node: return self\n"
        "def train(): return Node().next()"
    )
    assert type(notebook.carry(notebook.main.train)()).__name__ == "Node"


def test_a_name_that_is_nowhere_is_an_error_of_the_call(notebook: Notebook) -> None:
    notebook.cell("def train(): return missing")
    with pytest.raises(NameError, match="missing"):
        notebook.carry(notebook.main.train)()


def test_values_without_functions_need_nothing(notebook: Notebook) -> None:
    assert notebook.carry([1, {"a": max}]) == [1, {"a": max}]


@pytest.mark.parametrize(
    ("cell", "call", "message"),
    [
        (
            "import threading\nlock = threading.Lock()\ndef helper():\n    with lock: pass\ndef train(): helper()",
            "train",
            "workers cannot get helper from this session: it uses lock, a lock that cannot be pickled "
            r"\(TypeError: .*\); make it inside helper",
        ),
        ("def outer(n):\n    def f(): return n\n    return f\nf = outer(3)", "f", "is defined inside a function"),
        ("calls = [lambda: 0]", "calls[0]", "a lambda without a name; define a function with `def`"),
        ("def train(): pass\nold = train\ndef train(): pass", "old", "the name train stands for something else by now"),
        ("class Net: pass\ndef f(self): pass\nNet.f = f", "Net", "its method f was set later"),
        ("class Net:\n    def f(self): pass\ndef g(self): pass\nNet.g = g", "Net", "its method g was set later"),
        ("import functools\ndef f(): pass\nf = functools.lru_cache(f)", "f", "it was wrapped after its `def`"),
        ("train = eval('lambda: 0')", "train", "Python does not have its source"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_named_with_what_to_do(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cell: str, call: str, message: str
) -> None:
    value: Any = eval(call, notebook.cell(cell))
    with pytest.raises(
        LaunchError, match=f"{message}.*A module always works: put it into a file train.py, and run `from"
    ):
        notebook.carry(value)
    monkeypatch.setitem(sys.modules, "IPython", sys)
    with pytest.raises(LaunchError, match=r"begin its cell with `%%writefile train.py`"):
        notebook.carry(value)


def test_a_magic_command_is_called_that(notebook: Notebook) -> None:
    notebook.cell("get_ipython = lambda: None\ndef train(): get_ipython().system('ls')")
    with pytest.raises(LaunchError, match="it has a %magic or a !command, which only a notebook knows"):
        notebook.carry(notebook.main.train)
