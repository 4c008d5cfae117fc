from __future__ import annotations

import functools
import runpy
from pathlib import Path

import called
import pytest
from cells import Notebook

from launcher.calls import sources


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


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
