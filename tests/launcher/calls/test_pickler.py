from __future__ import annotations

import functools
import io
import pickle
from pathlib import Path
from typing import Any

import called
import pytest
import torch
from cells import Notebook

from launcher.calls import pickler


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


def dumped(value: object) -> Any:
    file = io.BytesIO()
    pickler.CallPickler(file).dump(value)
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
    assert pickler.of_main([functools.partial(main.train, 1), {"net": main.net}, called.rank]) == [main.train, main.Net]


def test_a_script_is_imported(notebook: Notebook) -> None:
    notebook.cell("def train(): pass")
    notebook.main.__file__ = __file__
    assert pickler.of_main(notebook.main.train) == []
    assert pickler.preparation("worker 0")["init_main_from_path"] == __file__


def test_a_script_with_magics_is_not_imported(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("def train(): pass")
    script = tmp_path / "train.ipy"
    script.write_text("%time import torch\n")
    notebook.main.__file__ = str(script)
    assert pickler.of_main(notebook.main.train) == [notebook.main.train]
    assert "init_main_from_path" not in pickler.preparation("worker 0")
