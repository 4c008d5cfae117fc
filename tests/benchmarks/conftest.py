from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.figures import Result, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are not installed

from benchmarks.options import parse  # noqa: E402
from benchmarks.session import Session  # noqa: E402


@dataclass
class Fake:
    """A contender that needs no processes: each run takes the next of its figures, or raises it."""

    name: str
    figures: list = field(default_factory=lambda: [1.0])
    log: list = field(default_factory=list)

    def run(self):
        self.log.append(self.name)
        figure = self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]
        if isinstance(figure, Exception):
            raise figure
        return {self.name: [figure]}


@pytest.fixture
def fake():
    return Fake


@pytest.fixture
def session(tmp_path):
    """``session.console.file.getvalue()`` is what it prints."""

    def make(*words: str) -> Session:
        console = Console(file=io.StringIO(), width=200)
        return Session(parse([*words, "--out", str(tmp_path / "out")]), console)

    return make


@pytest.fixture
def result():
    rows = [Row("ours", [30.0, 10.0, 20.0]), Row("mxnet", [100.0]), Row("gloo", note="skipped: no gloo")]
    return Result("work", "Some work", rows, ("mxnet", "gloo"))
