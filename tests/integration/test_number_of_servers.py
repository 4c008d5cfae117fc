"""A real job that goes on with more servers, which have standbys: the bits of one server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import job

ROUNDS = 12

SCRIPT = """
    import hashlib, os
    import torch
    import kvstore as kv

    OPTIMIZERS = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "adamw": {}, "adafactor": {}}
    SHAPES = {"long": (1013,), "tall": (40_009, 1), "small": (7,)}

    class Step:
        at = 0
        def state_dict(self):
            return {"at": self.at}
        def load_state_dict(self, state):
            self.at = state["at"]

    step, stores = Step(), {}
    for name, hyper in OPTIMIZERS.items():
        store = stores[name] = kv.create("dist_sync")
        store.set_optimizer(name, learning_rate=0.05, **hyper)
        drawn = torch.Generator().manual_seed(1)
        store.init(list(SHAPES), [torch.randn(shape, generator=drawn) for shape in SHAPES.values()])
        if name == "adamw":
            store.init("table", kv.Table(dim=5, init="normal"))
    stores["sgd"].attach("step", step)
    while step.at < int(os.environ["ROUNDS"]):
        for name, store in stores.items():
            drawn = torch.Generator().manual_seed(100 * store.rank + step.at)
            store.push(list(SHAPES), [torch.randn(shape, generator=drawn) for shape in SHAPES.values()])
            if name == "adamw":
                ids = torch.randperm(60, generator=drawn)[:20]
                store.push("table", kv.RowSparse(ids, torch.randn(20, 5, generator=drawn)))
        step.at += 1
    for name, store in stores.items():
        outs = [torch.empty(shape) for shape in SHAPES.values()]
        store.pull(list(SHAPES), out=outs)
        if name == "adamw":
            outs.append(store.row_sparse_pull("table", row_ids=torch.arange(60)))
        print("BITS", name, hashlib.sha256(b"".join(out.numpy().tobytes() for out in outs)).hexdigest(), flush=True)
    if "KVSTORE_CHECKPOINT_DIR" in os.environ:
        stores["sgd"].save_checkpoint(wait=True)
"""


def bits(tmp_path: Path, servers: int, rounds: int = ROUNDS, options: Sequence[str] = ()) -> list[str]:
    """Run a job; return what its workers have said of their bits, each line once."""
    with job(
        tmp_path,
        SCRIPT,
        workers=2,
        servers=servers,
        options=options,
        ROUNDS=str(rounds),
        KVSTORE_BIGARRAY_BOUND="500",
        KVSTORE_PIECE_BYTES="4096",
    ) as running:
        assert running.wait() == 0, running.output
        lines = {line[line.index("BITS") :] for line in running.output.splitlines() if "BITS" in line}
        return sorted(lines)


@pytest.mark.faults  # CI has this without processes (tests/kvstore/test_cuts.py), and one process costs it two seconds
def test_the_number_of_servers_changes_no_bit_over_a_checkpoint_and_with_standbys(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    never = bits(tmp_path, 1)
    assert len(never) == 4, never
    bits(tmp_path, 2, ROUNDS // 2, ["--checkpoint-dir", saved])
    assert bits(tmp_path, 3, options=["--resume", saved, "--replicas", "1"]) == never
