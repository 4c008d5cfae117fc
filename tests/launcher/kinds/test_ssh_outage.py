"""A line that is cut for a while: the job waits, and goes on as soon as the line is back."""

from __future__ import annotations

import re
import time

import pytest
from sites import Site
from waiting import LONG, PROMPT, until

OUTAGE_S = 6.7

# Each worker's share of a round is its rank + 1. After the first round that has taken long, worker 0 ends the training.
WORKER = """
import sys, time
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init(["w", "end"], [np.zeros(300_000, np.float32), np.zeros(1, np.float32)])
weight, end = np.zeros(300_000, np.float32), np.zeros(1, np.float32)
rounds, longest, left = 0, 0.0, 10
while not end[0]:
    if rounds == 5:
        print("training", flush=True)
    began = time.monotonic()
    left -= longest > 3.0
    last = store.rank == 0 and left == 0
    gradients = [np.full_like(weight, store.rank + 1.0), np.full_like(end, float(last))]
    store.pushpull(["w", "end"], gradients, [weight, end])
    rounds += 1
    longest = max(longest, time.monotonic() - began)
    assert (weight == -3.0 * rounds).all(), (rounds, weight)
    time.sleep(0.01)
print(f"worker {store.rank}: the longest of the rounds took {longest:.2f} s", flush=True)
"""


@pytest.mark.release
@pytest.mark.parametrize("encryption", ["keys", "plain"])
def test_a_job_outlives_an_outage_and_goes_on_when_the_line_is_back(over_ssh: Site, encryption: str) -> None:
    hosts = over_ssh.hosts
    hostfile = over_ssh.directory / "hosts"
    hostfile.write_text(f"{hosts.addresses[0]}\n{hosts.addresses[1]}\n")
    script = over_ssh.directory / "train.py"
    script.write_text(WORKER)
    words = ["-H", str(hostfile), "-n", "2", "-s", "2", "--env=KVSTORE_HEARTBEAT_TIMEOUT_S"]
    run = over_ssh.launch(
        *words,
        *(["--no-encryption"] if encryption == "plain" else []),
        "python",
        str(script),
        real=True,
        env={"KVSTORE_HEARTBEAT_TIMEOUT_S": "10"},
    )
    until(lambda: run.out.count("training") == 2, "training", over=run.over)
    hosts.cut(1)
    time.sleep(OUTAGE_S)
    hosts.mend(1)
    assert run.wait(LONG + PROMPT) == 0, run.err
    longest = [float(found) for found in re.findall(r"took ([\d.]+) s", run.out)]
    assert len(longest) == 2, run.out
    assert min(longest) > OUTAGE_S / 2, "nothing was cut"
    print(f"an outage of {OUTAGE_S} s ({encryption}): the longest round took {max(longest):.2f} s")
