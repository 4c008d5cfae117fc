"""A real Prometheus scrapes a real job, and the board's queries have answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from board import ALERTS, BOARD, Query, queries
from prometheus import Prometheus, prometheus
from waiting import LONG, until

ROOT = Path(__file__).resolve().parents[3]

# Batches come for as long as the test asks. Worker 1 waits for its own longer than worker 0, so that times are not 0.
PROGRAM = """
import time
import torch
import kvstore as kv
from workers import fit

class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.01 + 0.04 * store.rank)
            yield torch.ones(8), torch.tensor(1)

store = kv.create("dist_sync")
model = torch.nn.Linear(8, 2)
fit(model, torch.utils.data.DataLoader(Batches(), batch_size=1), num_epoch=1, kvstore=store)
"""


@contextmanager
def job(folder: Path, port: int, token: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have a job of two workers and two servers with a page at ``port`` while the block runs."""
    (folder / "train.py").write_text(PROGRAM)
    words = ["-n", "2", "-s", "2", f"--dashboard={port}", "--dashboard-token-file", str(token)]
    argv = [sys.executable, "-m", "launcher.launch", *words, f"{sys.executable} train.py"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LONG)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.long
def test_every_query_of_the_board_returns_data(tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    token.write_text("t" * 43 + "\n")
    token.chmod(0o600)
    with prometheus(tmp_path, f"127.0.0.1:{port}", token, ALERTS) as server, job(tmp_path, port, token) as running:

        def over() -> str | None:
            return None if running.poll() is None else (tmp_path / "job.log").read_text()

        def empty() -> list[Query]:
            asked = {query: query.filled("10s", job="kvstore", instance=server.target) for query in queries()}
            return [query for query, expr in asked.items() if not server.series(expr)]

        until(lambda: not empty(), "an answer to every query", over=over, step=0.2)
        both = 'count(rate(kvstore_rounds_total{role="worker"}[10s]) > 0) == 2'
        until(lambda: server.series(both), "rounds of both workers", over=over, step=0.2)
        look_at_the_variables(server)
        until(lambda: server.rules() == {"ok"}, "the rules for alerts", over=over, step=0.2)


def look_at_the_variables(server: Prometheus) -> None:
    """What a user chooses from at the top of the board."""
    values = {}
    for variable in BOARD["templating"]["list"][1:]:
        selector, _, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rpartition(", ")
        matching = selector.replace("$job", "kvstore")
        values[variable["name"]] = server.ask(f"label/{label}/values", **{"match[]": matching})
    assert values == {"job": ["kvstore"], "instance": [server.target]}
