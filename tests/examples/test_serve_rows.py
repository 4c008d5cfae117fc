"""serve_rows.py beside train_fm.py: what a reader finds is what the workers have trained."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import serve_rows
import torch
import train_fm
from fm import options
from reading_job import job_with_readers, reader_of

from kvstore.client import DistStore

SMALL = ("--clicks", "1000", "--batch-size", "200", "--input-size", "500", "--factor-size", "4")


def test_a_reader_finds_what_was_trained() -> None:
    args = options.parse(SMALL)
    with job_with_readers() as job:

        def work(store: DistStore) -> None:
            reached = train_fm.train(args, store)
            with reader_of(job) as reader:
                assert serve_rows.evaluate(reader, list(train_fm.test_batches(args))) == reached

        job.run(work)


def test_it_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ending:
        """A reader of a job that ends when it has been asked twice."""

        def __init__(self) -> None:
            self.asked = 0

        def __enter__(self) -> Ending:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def wait_for(self, keys: list[str]) -> None: ...

        def rounds(self, key: str) -> tuple[int, int]:
            return 10 * self.asked, 10 * self.asked

        def pull(self, key: str) -> torch.Tensor:
            self.asked += 1
            if self.asked > 2:
                raise serve_rows.kv.NodeLost("the job has ended")
            return torch.zeros(1)

        def row_sparse_pull(self, keys: list[str], row_ids: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.zeros(len(row_ids[0]), 1), torch.zeros(len(row_ids[1]), 4)]

    file = tmp_path / "readers.json"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["serve_rows.py", str(file), "--every", "0", *SMALL])
    monkeypatch.setattr(serve_rows.kv, "connect", lambda *_, **__: Ending())
    with caplog.at_level("INFO"):
        serve_rows.main()
    assert [re.sub(r"AUC.*", "AUC", line) for line in caplog.messages] == [
        "after round 10: AUC",
        "after round 20: AUC",
        "the job has ended",
    ]


def test_what_the_user_can_mend_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "readers.json"
    file.touch(mode=0o600)
    monkeypatch.setattr(sys, "argv", ["serve_rows.py", str(file), *SMALL])
    with pytest.raises(SystemExit, match=r"^serve_rows.py: error: .* is not a file"):
        serve_rows.main()
