"""What reaches a worker of a call, and what comes back. No processes."""

from __future__ import annotations

import ast
import builtins
import codeop
import gc
import io
import linecache
import os
import pickle
import runpy
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import called
import pytest
import torch
from called import Odd

import kvstore
from launcher.calls import handover, outcome
from launcher.calls.handover import CallPickler, Handover
from launcher.calls.outcome import Failed, Outcome, Returned, Surroundings, Unfinished, work
from launcher.errors import LaunchError

# ---- what of a notebook's `__main__` reaches a worker, and what an error says of the rest. No processes


class Notebook:
    """Executes cells, and carries values over to a worker's `__main__`, through a pickle."""

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
        file = io.BytesIO()
        pickler = CallPickler(file)
        pickler.dump((value, pickler.surroundings))
        self._patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        # cloudpickle knows its own classes again, by these; a worker is another process.
        for table in ("_DYNAMIC_CLASS_TRACKER_BY_ID", "_DYNAMIC_CLASS_TRACKER_BY_CLASS"):
            self._patch.setattr(f"cloudpickle.cloudpickle.{table}", {})
        carried, surroundings = pickle.loads(file.getvalue())
        surroundings.enter()
        return carried


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
    assert value.point.color is sys.modules["__main__"].Color.RED
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
    ("cell", "call", "value"),
    [
        ("def outer(n):\n    def f(): return n\n    return f\nf = outer(3)", "f", 3),
        ("calls = [lambda: 0]", "calls[0]", 0),
        ("def train(): return 1\nold = train\ndef train(): return 2", "old", 1),
        ("class Net: pass\ndef f(self): return 3\nNet.f = f", "Net().f", 3),
        ("class Net:\n    def f(self): pass\ndef g(self): return 4\nNet.g = g", "Net().g", 4),
        ("import functools\ndef f(): return 5\nf = functools.lru_cache(f)", "f", 5),
        ("N = 1\ndef train(a=N, *, b=N): return a, b, N\nN = 2", "train", (1, 1, 2)),
        ("class A: x = 1\nif True:\n    class A: y = 2\n    def f(): return A.y, hasattr(A, 'x')", "f", (2, False)),
        ("import math\nclass Net:\n    def f(self): pass\ndef f(self): return math.sqrt(9)\nNet.f = f", "Net().f", 3),
        ("train = eval('lambda: 0')", "train", 0),
        ("import functools\nclass Net:\n    f = functools.cached_property(lambda self: 6)", "lambda: Net().f", 6),
        ("import torch\n@torch.no_grad()\ndef train(): return torch.is_grad_enabled()", "train", False),
    ],
)  # fmt: skip
def test_what_has_no_statement_or_another_one_by_now(notebook: Notebook, cell: str, call: str, value: object) -> None:
    assert notebook.carry(eval(call, notebook.cell(cell)))() == value


LOCK = r"a lock that cannot be pickled \(TypeError: .*\); make it inside "


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("def helper():\n    with lock: pass\ndef train(): helper()", f"helper from .*: it uses lock, {LOCK}helper"),
        ("def train(): train, other\ndef other(): train, lock", f"other from .*: it uses lock, {LOCK}other"),
        ("def outer(inner):\n    return lambda: inner\ntrain = outer(lock)", "outer.* it uses inner, "),
        ("def train(x=lock): pass", "train from .*: it uses x, "),
        ("class Net: held = lock\ndef train(): Net()", f"Net from .*: it uses held, {LOCK}Net"),
        ("class Net:\n    @property\n    def f(self): lock\ndef train(): Net()", r"Net\.f from .*: it uses lock, "),
        (
            "opened = sys.__stdout__\ndef train(): opened",
            "train from .*: it uses opened, a TextIOWrapper that cannot be pickled",
        ),
    ],
)
def test_what_cannot_be_given_is_named_with_what_to_do(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cell: str, message: str
) -> None:
    notebook.cell(f"import sys, threading\nlock = threading.Lock()\n{cell}")
    for how in ("put it into a file train.py, and run `from", r"begin its cell with `%%writefile train.py`"):
        with pytest.raises(LaunchError, match=f"workers cannot get {message}.*A module always works: {how}"):
            Handover(dict, (), {"a": [notebook.main.train]}, 1)
        monkeypatch.setitem(sys.modules, "IPython", sys)


def test_a_magic_command_is_called_that(notebook: Notebook) -> None:
    notebook.cell("get_ipython = lambda: None\ndef train(): get_ipython().system('ls')")
    with pytest.raises(LaunchError, match="it has a %magic or a !command, which only a notebook knows"):
        notebook.carry(notebook.main.train)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def before() -> int:
    """How many files are open before a test: none that garbage of an earlier test would close in the middle of it."""
    gc.collect()
    return open_files()


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
        assert [pickle.load(pages), pickle.load(pages)[:3]] == ["divmod", (divmod, (7, 3), {})]
    handover.close()


def test_nothing_stays_open(before: int) -> None:
    handover = Handover(called.rank, (), {}, 2)
    handover.started()
    handover.close()
    handover.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (threading.Lock().acquire, (), {}, r"cannot hand lock.acquire itself to the workers \(TypeError: .*lock"),
        (divmod, (1, [threading.Lock()]), {}, r"cannot hand args\[1\]\[0\] to the workers \(TypeError: .*lock"),
        (dict, (), {"a": {"b": threading.Lock()}}, r"cannot hand kwargs\['a'\]\['b'\] to the workers"),
    ],
)
def test_what_cannot_be_pickled_is_named_and_nothing_stays_open(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str, before: int
) -> None:
    with pytest.raises(LaunchError, match=message):
        Handover(function, args, kwargs, 2)
    assert open_files() == before


def dumped(value: object) -> Any:
    file = io.BytesIO()
    CallPickler(file).dump(value)
    return pickle.loads(file.getvalue())


def test_a_tensor_is_copied() -> None:
    tensor = torch.ones(3)
    (copy,) = dumped([tensor])
    copy += 1
    assert not tensor.is_shared()
    assert torch.equal(tensor, torch.ones(3))


def test_a_script_is_imported(notebook: Notebook) -> None:
    notebook.cell("def train(): pass\nclass Net:\n    class Part: pass")
    notebook.main.__file__ = __file__
    train, named = notebook.main.train, [notebook.main.train, notebook.main.Net, notebook.main.Net.Part]
    assert dumped(named) == named
    assert dumped(lambda: train)() is train
    assert handover.preparation("worker 0")["init_main_from_path"] == __file__


def test_a_script_with_magics_is_not_imported_nor_one_that_a_prompt_goes_on_from(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.cell("def train(): pass")
    script = tmp_path / "train.ipy"
    script.write_text("%time import torch\n")
    for file in (str(script), __file__):
        notebook.main.__file__ = file
        assert dumped(notebook.main.train) is not notebook.main.train
        assert "init_main_from_path" not in handover.preparation("worker 0")
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def test_what_a_worker_has_is_pickled_by_its_name_and_a_traceback_shows_the_line_of_the_cell(
    notebook: Notebook,
) -> None:
    notebook.cell("class Net: pass\ndef fail():\n    Net()\n    raise ValueError('no data')")
    fail, net = notebook.carry((notebook.main.fail, notebook.main.Net()))
    linecache.checkcache()
    assert type(pickle.loads(pickle.dumps(net))) is type(net) is sys.modules["__main__"].Net is not notebook.main.Net
    with pytest.raises(ValueError, match="no data") as caught:
        fail()
    lines = "".join(traceback.format_exception(caught.value))
    assert "File \"<cell 1>\", line 4, in fail\n    raise ValueError('no data')" in lines


def test_a_function_that_has_run_often_is_the_same(notebook: Notebook) -> None:
    notebook.cell("def train(x, n=3):\n    def inner(y): return [y + x for _ in range(n)]\n    return inner(x)[0]")
    for x in range(200):
        notebook.main.train(x)
    assert notebook.carry(notebook.main.train)(4) == 8


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
    train, net, also = notebook.carry([notebook.main.train, notebook.main.Net, notebook.main.also])
    assert (train(9), net().f(), also(16)) == (3, 2, 4)


def test_a_file_that_has_changed_is_no_matter(notebook: Notebook, tmp_path: Path) -> None:
    """As after IPython's `%run`, which leaves functions of a file in `__main__`."""
    file = tmp_path / "script.py"
    file.write_text("def train():\n    return 1\n")
    notebook.main.train = runpy.run_path(str(file), run_name="__main__")["train"]
    file.write_text("def train():\n    return 22\n")
    assert notebook.carry(notebook.main.train)() == 1


# ---- outcome


@pytest.fixture
def fd() -> Iterator[int]:
    made = outcome.make_memory()
    yield made
    os.close(made)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_how_far_the_worker_came(fd: int) -> None:
    assert outcome.get(fd) == Unfinished(begun=False)
    outcome.begin(fd)
    assert outcome.get(fd) == Unfinished(begun=True)
    outcome.put_value(fd, {"rank": 1})
    assert outcome.get(fd) == Returned({"rank": 1})


def test_a_value_that_cannot_be_pickled_leaves_the_call_unfinished(fd: int) -> None:
    outcome.begin(fd)
    with pytest.raises(TypeError, match="lock"):
        outcome.put_value(fd, threading.Lock())
    assert outcome.get(fd) == Unfinished(begun=True)


def test_an_error_arrives_with_its_traceback(fd: int) -> None:
    outcome.put_error(fd, raised(ValueError("no data")))
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert failed.how == "raised ValueError: no data"
    assert failed.details.startswith("Traceback")
    assert "in raised" in failed.details
    assert failed.error is not None
    error = pickle.loads(failed.error)
    assert (type(error), str(error)) == (ValueError, "no data")


def test_our_frames_are_left_out_unless_they_are_asked_for(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvstore.UnknownName) as caught:
        kvstore.create("dist_snyc")
    details = []
    for verbose in ("0", "1"):
        monkeypatch.setenv("KVSTORE_VERBOSE", verbose)
        outcome.put_error(fd, caught.value)
        failed = outcome.get(fd)
        assert isinstance(failed, Failed)
        details.append(failed.details)
    assert "KVSTORE_VERBOSE=1 shows all" in details[0]
    assert ["registry.py" in text for text in details] == [False, True]


@pytest.mark.parametrize("error", [Odd("x", "y"), KeyboardInterrupt(), ValueError(threading.Lock())])
def test_an_error_that_would_not_come_out_again_is_told_in_words(fd: int, error: BaseException) -> None:
    outcome.put_error(fd, error)
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert failed.error is None
    assert failed.how.startswith(f"raised {'called.' if type(error) is Odd else ''}{type(error).__name__}")


def test_an_error_of_ours_says_what_it_is_about(fd: int) -> None:
    outcome.put_error(fd, ValueError("x"), "could not load train")
    failed = outcome.get(fd)
    assert isinstance(failed, Failed)
    assert (failed.how, failed.error) == ("could not load train: ValueError: x", None)


HELD = threading.Lock()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (HELD, "args"),
        ([1, HELD], "args[1]"),
        ({"a": 1, "b": {"c": (0, HELD)}}, "args['b']['c'][1]"),
        ([[[HELD]]], "args[0][0][0]"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named(value: Any, where: str) -> None:
    assert outcome.culprit("args", value, pickle.dumps) == (where, HELD)


def test_what_is_deeper_than_anybody_looks_is_named_as_far_as_that() -> None:
    assert outcome.culprit("args", [[[HELD]]], pickle.dumps, depth=2) == ("args[0][0]", [HELD])


def test_what_was_written_is_read_from_the_beginning_by_each_reader(fd: int) -> None:
    os.write(fd, b"one two")
    with outcome.view_memory(fd) as first, outcome.view_memory(fd) as second:
        assert first.read(3) == b"one"
        assert second.read() == b"one two"
        assert first.read() == b" two"


def test_it_is_for_those_alone_who_inherit_it(fd: int) -> None:
    code = "import os, sys; os.pwrite(int(sys.argv[1]), b'theirs', 0)"
    argv = [sys.executable, "-S", "-c", code, str(fd)]
    assert subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 1
    subprocess.run(argv, pass_fds=(fd,), check=True)
    with outcome.view_memory(fd) as pages:
        assert pages.read() == b"theirs"


def test_where_the_system_has_no_such_memory_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd = outcome.make_memory()
    os.write(fd, b"x")
    with outcome.view_memory(fd) as pages:
        assert pages.read() == b"x"
    os.close(fd)


Work = Callable[..., Outcome]
NOTHING = Surroundings({}, {}, {})


@pytest.fixture
def made() -> Iterator[Work]:
    """Make a call as a worker does, and return what became of it."""
    fds: list[int] = []

    def make(function: Any, *args: Any, code: int | None = None, call: bytes | None = None) -> Outcome:
        fds.extend([outcome.make_memory(), outcome.make_memory()])
        os.write(fds[-2], pickle.dumps("train"))
        os.write(fds[-2], pickle.dumps((function, args, {}, NOTHING)) if call is None else call)
        if code is None:
            work(fds[-2], fds[-1])
        else:
            with pytest.raises(SystemExit) as left:
                work(fds[-2], fds[-1])
            assert left.value.code == code
        return outcome.get(fds[-1])

    yield make
    for fd in fds:
        os.close(fd)


def failing(text: str) -> None:
    raise ValueError(text)


def locked() -> dict[str, Any]:
    return {"lock": threading.Lock()}


def test_what_the_call_returns(made: Work) -> None:
    assert made(divmod, 7, 3) == Returned((2, 1))


def test_what_it_raises_begins_at_the_users_own_lines_and_is_known_at_exit(
    made: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    failed = made(failing, "no data", code=1)
    assert isinstance(failed, Failed)
    assert failed.how == "raised ValueError: no data"
    assert "in failing" in failed.details
    assert "calls/outcome.py" not in failed.details
    assert str(sys.last_value) == "no data"


def test_leaving_with_success_is_to_return_nothing(made: Work) -> None:
    assert made(sys.exit) == made(sys.exit, 0) == Returned(None)


def test_leaving_with_a_code_is_for_launcher_run_to_see(made: Work) -> None:
    assert made(sys.exit, 7, code=7) == Unfinished(begun=True)


def test_what_cannot_be_loaded_is_said_and_what_would_do(made: Work) -> None:
    failed = made(None, code=1, call=b"\x80\x05cno_such_module\nf\n.")
    assert isinstance(failed, Failed)
    assert failed.how.startswith("could not load train or its arguments; define it at the top of a module")
    assert "No module named 'no_such_module'" in failed.how


def test_what_cannot_be_sent_back_is_named(made: Work) -> None:
    failed = made(locked, code=1)
    assert isinstance(failed, Failed)
    assert failed.how.startswith("returned a dict that cannot be pickled: result['lock']")


def test_its_programs_do_not_inherit_the_memory(made: Work) -> None:
    call, result = outcome.make_memory(), outcome.make_memory()
    for fd in (call, result):
        os.set_inheritable(fd, True)
    os.write(call, pickle.dumps("x") + pickle.dumps((int, (), {}, NOTHING)))
    work(call, result)
    assert not os.get_inheritable(call)
    assert not os.get_inheritable(result)
    os.close(call)
    os.close(result)
