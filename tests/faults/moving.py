"""Servers and standbys that are moved while a job of ``launch.py`` runs: the same bits, and how long a round takes.

``python -m faults.moving`` makes 20 moves in a job of each kind, then the same rounds undisturbed, and compares all
bytes of the values. ``--moves 0`` shows what a machine's own noise is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvstore as kv
from faults.plan import Plan
from faults.processes import running

ROOT = Path(__file__).parents[2]
SIZE, ROWS, EACH = 100_000, 2_000, 200
STEP_S = 0.02  # of a worker's own work in a round
LIMIT_S = 60.0  # of one wait
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("dist_sync", {}),
    "rows": ("dist_sync", {}),
    "coded": ("dist_sync", {}),
    "quorum": ("dist_sync", {"quorum": 1, "late": "keep"}),
    "async": ("dist_async", {}),
    "ssp": ("dist_ssp", {"staleness": 2}),
}
SAME_BITS = ("sync", "rows", "coded")  # the others are counted


def work(mode: str, rounds: int) -> None:
    """Be one worker: push until there is a file ``stop``, or for so many rounds; print a line of JSON."""
    kind, options = MODES[mode]
    store = kv.create(kind, bigarray_bound=1000, **options)
    dice = np.random.default_rng(store.rank)
    if mode == "coded":
        store.set_gradient_compression({"type": "2bit", "threshold": 0.01})
    if mode in SAME_BITS:
        store.set_optimizer("sgd", learning_rate=0.01, momentum=0.9)
    else:
        store.set_optimizer("sgd", learning_rate=1.0)
    weight, end = np.zeros(SIZE, np.float32), np.zeros(1, np.float32)
    store.init(["w", "end"], [weight, end])
    if mode == "rows":
        store.init("t", kv.Table(dim=16))
    made, times = 0, [time.monotonic()]
    while made != (rounds or -1) and not end[0]:
        drawn = dice.standard_normal(SIZE, dtype=np.float32)
        gradient = drawn if mode in SAME_BITS else np.ones_like(drawn)
        if mode == "rows":
            ids = np.unique(dice.integers(0, ROWS, EACH))
            pushed = kv.RowSparse(ids, dice.standard_normal((len(ids), 16), dtype=np.float32))
            store.push("t", pushed)
        last = not rounds and store.rank == 0 and Path("stop").exists()
        store.pushpull(["w", "end"], [gradient, np.full(1, float(last), np.float32)], [weight, end])
        made += 1
        time.sleep(STEP_S)
        times.append(time.monotonic())
        if made == 50 and store.rank == 0:
            Path("begun").touch()
    store.barrier()
    store.pull("w", weight)
    digest = hashlib.sha256(weight.tobytes())
    if mode == "rows":
        everything = np.zeros((ROWS, 16), np.float32)
        store.row_sparse_pull("t", everything, row_ids=np.arange(ROWS))
        digest.update(everything.tobytes())
    print(
        json.dumps(
            {
                "rounds": made,
                "digest": digest.hexdigest(),
                "least": float(weight.min()),
                "most": float(weight.max()),
                "gaps": np.diff(times)[20:].tolist(),
                "takeovers": store.statistics().takeovers,
            }
        ),
        flush=True,
    )


@dataclass
class Run:
    """One job: what its workers have printed, and how long each order took, in seconds."""

    workers: list[dict[str, Any]]
    orders: list[float]
    output: str


def carry_out(mode: str, moves: int, seed: int = 0) -> Run:
    """Run a job of ``launch.py``, and move a server or standby so many times, each when the last one is in step."""
    dice, orders = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="mv-") as name:
        directory = Path(name)
        here = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        environ = {key: text for key, text in os.environ.items() if not key.startswith(("DMLC_", "KVSTORE_"))}
        environ |= {"PYTHONPATH": here, "TMPDIR": name}
        words = ["-n", "2", "-s", "2", "--replicas", "1", sys.executable, "-m", "faults.moving", "--work", mode]
        with (directory / "err").open("w+") as err:
            job = subprocess.Popen(
                [sys.executable, "-m", "launcher", *words],
                cwd=directory,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
            try:
                _wait(job, directory, lambda said: (directory / "begun").exists())
                for number in range(moves):
                    began = time.monotonic()
                    process = f"{dice.choice(('server', 'standby'))}:{dice.randrange(2)}"
                    order = ["launcher.job_command", "move-server", process, f"--job={job.pid}"]
                    told = subprocess.run(
                        [sys.executable, "-m", *order], env=environ, capture_output=True, text=True, timeout=LIMIT_S
                    )
                    if told.returncode:
                        said = (directory / "err").read_text()
                        raise AssertionError(f"{process} could not be moved: {told.stderr}\n{said}")
                    orders.append(time.monotonic() - began)
                    _wait(job, directory, lambda said, number=number: said.count("in step again") > number)
                (directory / "stop").touch()
                out, _ = job.communicate(timeout=LIMIT_S)
            finally:
                job.kill()
                job.wait()
        said = (directory / "err").read_text()
    if job.returncode:
        raise AssertionError(f"the job has ended with {job.returncode}\n{out}\n{said}")
    return Run(_said(out), orders, said)


def undisturbed(mode: str, rounds: int) -> list[dict[str, Any]]:
    """Return what the workers of a job say that makes so many rounds in peace: forks of this process, on two servers."""
    plan = replace(Plan.of(0, "unix"), faults=())
    with running(plan, partial(_in_peace, mode, rounds)) as processes:
        left = processes.wait(LIMIT_S)
        if left or any(processes.codes.values()):
            raise AssertionError(f"{left} have not ended, and these have: {processes.codes}\n{processes.output}")
        return _said(processes.output)


def _in_peace(mode: str, rounds: int, directory: Path) -> None:
    os.chdir(directory)
    work(mode, rounds)


def _said(output: str) -> list[dict[str, Any]]:
    texts = [line.partition("] ")[2] for line in output.splitlines()]
    return [json.loads(text) for text in texts if text.startswith("{")]


def judge(mode: str, run: Run) -> str:
    """Return what is wrong with a run; "" if nothing is."""
    workers = run.workers
    if len({worker["digest"] for worker in workers}) > 1:
        return "the workers have other values"
    if mode in SAME_BITS:
        if undisturbed(mode, workers[0]["rounds"])[0]["digest"] != workers[0]["digest"]:
            return "other bits than in the undisturbed run"
    else:
        wanted = -float(sum(worker["rounds"] for worker in workers))
        if (workers[0]["least"], workers[0]["most"]) != (wanted, wanted) and mode != "quorum":
            return f"{wanted:g} pushes, and values from {workers[0]['least']:g} to {workers[0]['most']:g}"
    return ""


def _wait(job: subprocess.Popen[str], directory: Path, condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition(said := (directory / "err").read_text()):
        if job.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"it has not come so far\n{said}")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.moving", description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES), help="default %(default)s")
    parser.add_argument("--moves", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, rounds=0)
        return 0
    wrong = 0
    for mode in options.modes.split(","):
        run = carry_out(mode, options.moves, seed=options.seed)
        why = judge(mode, run)
        wrong += bool(why)
        gaps = [gap for worker in run.workers for gap in worker["gaps"]]
        median = statistics.median(gaps)
        print(
            f"{mode}: {why or 'exact'}; {options.moves} moves, {run.workers[0]['takeovers']} takeovers, "
            f"{run.workers[0]['rounds']} rounds; a round takes {1000 * median:.1f} ms in the median, "
            f"{1000 * max(gaps):.1f} at most ({max(gaps) / median:.1f} rounds); "
            f"an order {1000 * statistics.median(run.orders or [0.0]):.0f} ms",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
