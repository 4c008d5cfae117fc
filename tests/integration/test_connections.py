"""Connections that break while a job runs: what was under way is asked again, and takes effect once."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from cutting import cut
from jobs import job

pytestmark = pytest.mark.release

ROUNDS = 60
SIZES = (1 << 18, 1000, 1)  # elements of keys: of the first so many that connections are cut in the middle of messages
CUTS = 20  # before the second half of the rounds, and as many again in it: a busy machine would do little else
SCRIPT = """
    import pathlib, time
    import numpy as np
    import kvstore as kv

    store = kv.create("{kind}")
    sync = "async" not in store.type
    keys, sizes = ["a", "b", "c"], {sizes}
    if not sync:
        store.set_optimizer("sgd", learning_rate=1.0)
    store.init(keys, [np.zeros(size, "float32") for size in sizes])
    outs = [np.empty(size, "float32") for size in sizes]
    print("begun", flush=True)
    for number in range(1, {rounds} + 1):
        while number == {rounds} // 2 and not pathlib.Path("{enough}").exists():
            time.sleep(0.01)
        gradients = [np.full(size, number % 7, "float32") for size in sizes]
        if number % 2:
            store.pushpull(keys, gradients, out=outs)
        else:
            store.push(keys, gradients)
            gradients = [gradient.fill(99) for gradient in gradients]
            store.pull(keys, out=outs)
        if sync:
            assert all((out == 2 * (number % 7)).all() for out in outs), outs
        store.barrier()
    store.pull(keys, out=outs)
    store.barrier()
    found = sorted({{float(value) for out in outs for value in out[:: len(out) // 9 + 1]}})
    print(f"ends with {{found}}\\n", end="", flush=True)  # in one write: there may be nobody who keeps lines apart
"""


# ``make faults`` has the other combinations, by seeds.
@pytest.mark.parametrize(("kind", "keys"), [("dist_sync", True), ("dist_async", False)])
def test_nothing_is_lost_and_nothing_happens_twice(tmp_path: Path, kind: str, keys: bool) -> None:
    enough = tmp_path / "enough"
    script = SCRIPT.format(kind=kind, sizes=SIZES, rounds=ROUNDS, enough=enough)
    pushed = sum(2.0 * (number % 7) for number in range(1, ROUNDS + 1))
    cuts = 0
    with job(tmp_path, script, keys=keys, KVSTORE_TRANSPORT="tcp", KVSTORE_SHM="0") as running:
        running.until(lambda: running.output.count("begun") == 2, "the first round")
        members = running.members()
        for number in itertools.count():
            if running.process.poll() is not None:
                break
            cuts += cuts < 2 * CUTS and cut(members[number % len(members)], number // len(members))
            if cuts == CUTS:
                enough.touch()
            time.sleep(0.03)
        assert running.wait() == 0, running.output
    assert running.output.count(f"ends with [{-pushed if 'async' in kind else 2.0 * (ROUNDS % 7)}]") == 2, (
        running.output
    )
