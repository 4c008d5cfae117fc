"""What all places share; ``tests/kvstore/reading/test_place.py`` has those of readers."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import CurveKeys
from kvstore.job.place import JobPlace


@dataclass(frozen=True)
class VisitingPlace(JobPlace):
    ROLE: ClassVar[str] = "visitor"
    VERB: ClassVar[str] = "visited"
    MADE_BY: ClassVar[str] = "a test"

    count: int = 0
    since: float = 0.0

    def curve_keys(self, root_key: str) -> CurveKeys:
        return CurveKeys.of_observer(self.key, root_key)


def written(file: Path, **changes: object) -> Path:
    VisitingPlace("ipc:///x/scheduler", count=3, since=2.5).write(file, durable=False)
    if changes:
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def test_further_fields_are_kept(tmp_path: Path) -> None:
    file = written(tmp_path / "place.json")
    assert VisitingPlace.read(file) == VisitingPlace("ipc:///x/scheduler", count=3, since=2.5)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "change", [{"count": True}, {"count": "3"}, {"since": None}, {"version": 2}, {"transport": "x"}]
)
def test_fields_of_another_kind_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not a file that this version's a test has written"):
        VisitingPlace.read(written(tmp_path / "place.json", **change))


def test_deeply_nested_text_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "place.json")
    file.write_text("[" * 60_000)
    with pytest.raises(ConfigError, match="not a file"):
        VisitingPlace.read(file)


def test_errors_name_the_role() -> None:
    with pytest.raises(ConfigError, match="a job is visited at ipc://path or tcp://host:port"):
        VisitingPlace("http://x")
    with pytest.raises(ConfigError, match="the key of visitors is not valid"):
        VisitingPlace("ipc:///x/scheduler", "key")
