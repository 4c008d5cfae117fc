"""A reader of a real job, which loses a server and its scheduler meanwhile, and then ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from jobs import job
from waiting import LONG

import kvstore as kv

ROUNDS = 20  # between two faults

SCRIPT = """
    from pathlib import Path

    import torch
    import kvstore as kv
    import workers

    workers.init()  # this store, a reducer's and the checkpoints' are not what a reader reads first
    workers.Reducer()
    store = kv.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("weight", torch.zeros(2000))
    store.init("rows", kv.Table(shape=(10, 2)))
    every = torch.arange(10)
    weight, stop = torch.empty(2000), Path(__file__).with_name("stop")
    while not stop.exists():
        store.push("rows", kv.RowSparse(every, -torch.ones(10, 2)))
        store.pushpull("weight", -torch.ones(2000), out=weight)
        store.publish("weight", label=f"{weight[0]:.0f}", dtype=torch.bfloat16)
"""


@pytest.mark.long
def test_a_reader_follows_its_job_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_READER_SHARE", "0.2")
    file = tmp_path / "readers.json"
    options = ["--replicas", "1", "--readers", str(file), "--inject", f"kill:server:0@round:{2 * ROUNDS}"]
    options += ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    with job(tmp_path, SCRIPT, workers=1, servers=1, options=options) as running:
        running.until(file.exists, "the file for readers")
        with kv.connect(file, timeout=LONG) as reader:
            reader.wait_for(["weight", "rows"])
            followed = torch.zeros(2000, dtype=torch.bfloat16)
            model = reader.follow({"weight": followed})

            def follow(rounds: int) -> None:
                """Read until there have been so many rounds."""
                seen = 0
                while seen < rounds:
                    weight = reader.pull("weight")
                    oldest, newest = reader.rounds("weight")
                    assert (weight.min(), weight.max()) == (oldest, newest)
                    assert oldest >= seen
                    row = reader.row_sparse_pull("rows", row_ids=[4, 5])
                    assert row.min() >= seen
                    version = model.version
                    if model.update():
                        assert model.version > version
                        assert followed.unique().tolist() == [torch.tensor(float(model.label)).bfloat16().item()]
                    seen = oldest

            follow(3 * ROUNDS)  # the server is lost
            running.until(running.said("its standby took over"), "a standby that takes over")
            (scheduler,) = running.members("scheduler")
            os.kill(scheduler, signal.SIGKILL)
            follow(reader.rounds("weight")[1] + ROUNDS)
            assert set(reader.keys()) == {"weight", "rows"}
            (tmp_path / "stop").touch()
            with pytest.raises(kv.NodeLost, match="has ended"):
                follow(1 << 30)
        assert running.wait() == 0, running.output
    assert not file.exists()
