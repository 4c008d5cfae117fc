"""Trackers of functions, and what the documentation shows of other libraries, against their signatures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from workers.callbacks import Log, tracker_of

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "callbacks.md"


def test_a_tracker_of_functions() -> None:
    calls: list[Any] = []
    tracker = tracker_of(lambda values, step: calls.append((values, step)), lambda: calls.append("close"))
    tracker.log({"loss": 0.5}, 1)
    tracker.close()
    tracker_of(print).close()
    assert calls == [({"loss": 0.5}, 1), "close"]


class FakeWandb(ModuleType):
    """W&B, as far as a log needs it, with the signatures of wandb 0.31."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__("wandb")
        self.calls = calls

    def init(
        self,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        *,
        resume: bool | str | None = None,
    ) -> Any:
        self.calls.append(("init", project, id, resume))

        def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert type(data) is dict
            assert commit is None
            self.calls.append((data, step))

        def finish(exit_code: int | None = None) -> None:
            self.calls.append(("finish", exit_code))

        return SimpleNamespace(log=log, finish=finish)


class FakeMlflow(ModuleType):
    """MLflow, as far as a log needs it, with the signatures of mlflow 3.17."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__("mlflow")
        self.calls = calls

    def start_run(
        self,
        run_id: str | None = None,
        experiment_id: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
    ) -> None:
        self.calls.append(("init", run_name, run_id, nested))

    def log_metrics(
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
    ) -> None:
        assert (synchronous, run_id, timestamp) == (None, None, None)
        self.calls.append((metrics, step))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(("finish", None if status == "FINISHED" else status))


@pytest.mark.parametrize("fake", [FakeWandb, FakeMlflow])
def test_what_the_reference_shows_of_other_libraries_works(fake: type, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = fake(calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if f"import {module.__name__}" in block)
    names: dict[str, Any] = {}
    exec(block, names)  # of our own documentation
    (log,) = (thing for thing in names.values() if isinstance(thing, Log))
    assert calls == []
    log.log({"loss": 0.5}, step=7)
    log.close()
    assert calls[0][0] == "init"
    assert calls[1:] == [({"loss": 0.5}, 7), ("finish", None)]
