"""A notebook, and memory for the outcome of a call."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cells import Notebook

from launcher.calls import outcome


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


@pytest.fixture
def fd() -> Iterator[int]:
    made = outcome.make_memory()
    yield made
    os.close(made)
