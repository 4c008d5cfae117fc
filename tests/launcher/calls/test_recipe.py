"""What of a notebook's `__main__` reaches a worker, and what an error says of the rest. No processes."""

from __future__ import annotations

import builtins
import functools
import io
import os
import pickle
import runpy
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import called
import pytest
import torch
from cells import Notebook

from launcher.calls import handover, outcome, sources
from launcher.calls.handover import Handover
from launcher.calls.outcome import Unfinished
from launcher.errors import LaunchError


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


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_worker_has_a_start_of_its_own_and_one_call() -> None:
    handover = Handover(divmod, (7, 3), {}, 3)
    assert handover.name == "divmod"
    assert len({start.writer for start in handover.starts}) == 3
    for rank, start in enumerate(handover.starts):
        assert start.reader in start.pass_fds
        assert start.writer not in start.pass_fds
        assert handover.outcome(rank) == Unfinished(begun=False)
        for fd in start.pass_fds:
            os.fstat(fd)
    shared = set.intersection(*(set(start.pass_fds) for start in handover.starts))
    calls = [fd for fd in shared if os.fstat(fd).st_size]
    with outcome.view_memory(calls[0]) as pages:
        assert [pickle.load(pages), pickle.load(pages)] == ["divmod", (divmod, (7, 3), {})]
    handover.close()


def test_nothing_stays_open() -> None:
    before = open_files()
    handover = Handover(called.rank, (), {}, 2)
    handover.started()
    handover.close()
    handover.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (lambda: None, (), {}, r"cannot hand .*<lambda> itself \(a function has to have a name in a module"),
        (divmod, (1, [threading.Lock()]), {}, r"cannot hand args\[1\]\[0\] to the workers \(TypeError: .*lock"),
        (dict, (), {"a": {"b": threading.Lock()}}, r"cannot hand kwargs\['a'\]\['b'\] to the workers"),
    ],
)
def test_what_cannot_be_pickled_is_named_and_nothing_stays_open(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    before = open_files()
    with pytest.raises(LaunchError, match=message):
        Handover(function, args, kwargs, 2)
    assert open_files() == before


def dumped(value: object) -> Any:
    file = io.BytesIO()
    handover.CallPickler(file).dump(value)
    return pickle.loads(file.getvalue())


def test_a_tensor_is_copied_and_a_lambda_goes_by_its_name(notebook: Notebook) -> None:
    notebook.cell("scale = lambda x: 2 * x")
    tensor = torch.ones(3)
    copy, scale = dumped([tensor, notebook.main.scale])
    copy += 1
    assert not tensor.is_shared()
    assert torch.equal(tensor, torch.ones(3))
    assert scale is notebook.main.scale


def test_what_of_main_a_value_comes_to(notebook: Notebook) -> None:
    notebook.cell("class Net: pass\ndef train(): pass\nnet = Net()")
    main = notebook.main
    assert handover.of_main([functools.partial(main.train, 1), {"net": main.net}, called.rank]) == [
        main.train,
        main.Net,
    ]


def test_a_script_is_imported(notebook: Notebook) -> None:
    notebook.cell("def train(): pass")
    notebook.main.__file__ = __file__
    assert handover.of_main(notebook.main.train) == []
    assert handover.preparation("worker 0")["init_main_from_path"] == __file__


def test_a_script_with_magics_is_not_imported(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("def train(): pass")
    script = tmp_path / "train.ipy"
    script.write_text("%time import torch\n")
    notebook.main.__file__ = str(script)
    assert handover.of_main(notebook.main.train) == [notebook.main.train]
    assert "init_main_from_path" not in handover.preparation("worker 0")


def test_the_statement_and_its_place(notebook: Notebook) -> None:
    notebook.cell("x = 1\n\n@staticmethod\ndef train():\n    return x\n")
    defined = sources.definition("train", notebook.main.train)
    assert (defined.filename, defined.line) == ("<cell 1>", 3)
    assert "return x" in defined.source


def test_what_belongs_to_main(notebook: Notebook) -> None:
    notebook.cell("class Net:\n    def f(self): pass\nnet = Net()\ndef train(): pass")
    main = notebook.main
    assert sources.is_of_main(main.Net)
    assert sources.is_of_main(main.train)
    assert sources.is_of_main(functools.lru_cache(main.train))
    for other in (main.net, main.net.f, called.rank, len, 3, main):
        assert not sources.is_of_main(other)


def test_names(notebook: Notebook) -> None:
    notebook.cell("class Net:\n    @staticmethod\n    def f(): pass\nscale = lambda: 0")
    assert sources.name_of(notebook.main.Net.f) == "Net.f"
    assert sources.name_of(notebook.main.scale) == "scale"


def test_a_function_that_has_run_often_is_the_same(notebook: Notebook) -> None:
    notebook.cell("def train(x, n=3):\n    def inner(y): return [y + x for _ in range(n)]\n    return inner(x)[0]")
    for x in range(200):
        notebook.main.train(x)
    assert sources.definition("train", notebook.main.train).line == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_function_beside_the_import_that_it_uses(notebook: Notebook, whole: bool) -> None:
    notebook.cell(
        """
        import math
        def train(x): return math.sqrt(x)
        class Net:
            def f(self): return math.sqrt(4)
        if math.pi > 3:
            def also(x): return math.sqrt(x)
        """,
        whole=whole,
    )
    for name, line in {"train": 3, "Net": 4, "also": 7}.items():
        assert sources.definition(name, getattr(notebook.main, name)).line == line


def test_a_method_that_was_set_later_is_not_taken(notebook: Notebook) -> None:
    notebook.cell("import math\nclass Net:\n    def f(self): return math.sqrt(4)")
    notebook.cell("def f(self): return math.sqrt(9)\nNet.f = f")
    with pytest.raises(LookupError):
        sources.definition("Net", notebook.main.Net)


def test_a_file_that_has_changed_is_not_taken(notebook: Notebook, tmp_path: Path) -> None:
    """As after IPython's `%run`, which leaves functions of a file in `__main__`."""
    file = tmp_path / "script.py"
    file.write_text("def train():\n    return 1\n")
    train = runpy.run_path(str(file), run_name="__main__")["train"]
    notebook.main.train = train
    assert sources.definition("train", train).filename == str(file)
    file.write_text("def train():\n    return 22\n")
    with pytest.raises(LookupError, match="its source has changed since it was defined"):
        sources.definition("train", train)
