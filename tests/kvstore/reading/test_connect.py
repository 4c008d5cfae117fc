from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore as kv


def test_which_job_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_READ_FROM", raising=False)
    with pytest.raises(kv.ConfigError, match="which job"):
        kv.connect()


@pytest.mark.parametrize("store", [0, "worker", None, 1.5])
def test_stores_are_counted_from_1(tmp_path: Path, store: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"counted from 1.*'workers' is that of workers.init\(\)"):
        kv.connect(tmp_path / "readers.json", store=store)


def test_where_nobody_listens_there_is_no_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(kv.DeadlineExceeded, match="nobody listens"):
        kv.connect(f"ipc://{tmp_path}/scheduler", timeout=0.05)
