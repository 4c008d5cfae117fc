"""``python -m faults.demo PREFIX --epochs 3``: the README's demo, in which a server is killed every other second.

It must end with the weights, bit by bit, that an undisturbed run has saved under PREFIX (``--model-prefix``). Ends with
1 if it does not, or if nobody was killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

from faults.killing import HEALED
from faults.launched import ROOT, Launched, launched

DEMO = "--dataset digits --batch-size 16"
BEGUN = "Epoch[0] Batch"  # what the demo prints when it trains
LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.demo", description=__doc__)
    parser.add_argument("prefix", type=Path, help="of the checkpoints of the undisturbed run")
    parser.add_argument("--epochs", type=int, default=3, help="to train; default %(default)s")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two kills; default %(default)s")
    options = parser.parse_args()
    script = ROOT / "examples" / "train_cifar10.py"
    command = f'{sys.executable} {script} {DEMO} --num-epochs {options.epochs} --model-prefix "$FAULTS_RUN/model"'
    with launched(command, {}) as job:
        kills = _kill(job, options.every)
        code = job.process.wait(LIMIT_S)
        name = f"-{options.epochs:04}.safetensors"
        made = job.directory / f"model{name}"
        wanted = options.prefix.with_name(options.prefix.name + name)
        same = code == 0 and _weights(made) == _weights(wanted)
        if not same or not kills:
            print(job.output)
        print(f"{kills} kills, exit code {code}: {'the same bits' if same else 'NOT the same bits'} as undisturbed")
    return 0 if same and kills else 1


def _weights(path: Path) -> bytes:
    """Return what follows the header of a file in safetensors' format; the header names the run."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def _kill(job: Launched, every_s: float) -> int:
    """Kill who serves a rank, again and again, when the one before has been replaced; return how often."""
    dice = random.Random(0)
    serving = ["server", "server"]
    kills = 0
    deadline = time.monotonic() + LIMIT_S
    while job.process.poll() is None and BEGUN not in job.output and time.monotonic() < deadline:
        time.sleep(0.1)
    due = time.monotonic() + every_s / 2
    while job.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if time.monotonic() < due or job.output.count(HEALED) < kills:
            continue
        rank = dice.randrange(2)
        pid = job.pid(f"{serving[rank]} {rank}")
        if pid is not None and job.process.poll() is None:
            os.kill(pid, signal.SIGKILL)
            serving[rank] = "standby" if serving[rank] == "server" else "server"
            kills += 1
            due = time.monotonic() + every_s
    return kills


if __name__ == "__main__":
    sys.exit(main())
