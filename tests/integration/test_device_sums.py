"""Processes of one host whose aggregator reads gradients from where they lie, and one of which is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from waiting import LONG, PROMPT

SCRIPT = """
    import os, signal, sys
    import torch
    import kvstore as kv

    device = torch.device(sys.argv[1])
    sizes = [300_000, 7, 5_000]
    stores = [kv.create("dist_sync"), kv.create("dist_device_sync")]
    rank = stores[0].rank
    for store in stores:
        store.init([0, 1, 2], [torch.zeros(size, device=device) for size in sizes])
    for number in range(5):
        torch.manual_seed(2 * number + rank)
        gradients = [(torch.randn(size) * 10 ** (4 * rank)).to(device) for size in sizes]
        values = []
        for store in stores:
            outs = [torch.empty(size, device=device) for size in sizes]
            store.pushpull([0, 1, 2], gradients, out=outs)
            values.append(outs)
        for usual, lent in zip(*values):
            assert torch.equal(usual, lent), "sums differ"
    usual, lent = (store.statistics() for store in stores)
    assert (usual.bytes_lent, lent.not_lent) == (0, ""), lent
    print(f"worker {rank} lent {lent.bytes_lent / sum(sizes) / 4:g} rounds", flush=True)
    stores[1].barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        stores[1].pushpull([0, 1, 2], gradients, out=outs)
    except kv.NodeLost as exc:
        print(f"worker {rank}: {exc}", flush=True)
"""
pytestmark = [pytest.mark.long, pytest.mark.timeout(LONG + 3 * PROMPT)]


@pytest.mark.parametrize(
    ("kind", "device"),
    [pytest.param("host", "cpu", marks=pytest.mark.release), pytest.param("cuda", "cuda:0", marks=pytest.mark.gpu)],
)
def test_sums_are_those_of_shared_memory_and_a_death_is_told(tmp_path: Path, kind: str, device: str):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    env = os.environ | {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": f"{port}",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "KVSTORE_NUM_AGGREGATORS": "1",
        "KVSTORE_DEVICE_SUM": kind,
        "KVSTORE_ENCRYPTION": "0",
        "KVSTORE_HEARTBEAT_S": "0.2",
        "KVSTORE_HEARTBEAT_TIMEOUT_S": "3",
        "OMP_NUM_THREADS": "1",
    }
    ours, theirs = [sys.executable, "-m", "servers"], [sys.executable, str(script), device]
    members = [("scheduler", 0, ours), ("server", 0, ours), ("aggregator", 0, ours)]
    members += [("worker", 0, theirs), ("worker", 1, theirs)]
    started: list[subprocess.Popen[str]] = []
    try:
        for role, rank, words in members:
            own = env | {"DMLC_ROLE": role, "DMLC_TASK_ID": f"{rank}"}
            own |= {"KVSTORE_AGGREGATOR": "0"} if role == "worker" else {}
            started.append(subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=LONG) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = "".join(output for output, _ in outputs)
    for rank in (0, 1):
        assert f"worker {rank} lent 4 rounds" in said, outputs
    assert "worker 0: worker 1 " in said, outputs
    assert all(process.returncode != 0 for process in started[1:3]), "the server and the aggregator end, too"
