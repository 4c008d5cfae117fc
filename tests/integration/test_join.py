"""Workers with different numbers of batches, as real processes; and one that dies while another waits in join."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jobs import job
from waiting import PROMPT


def test_every_sample_counts_once_though_workers_have_different_numbers_of_batches(tmp_path: Path) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import kvstore as kv
        from workers import SplitSampler

        store = kv.create("dist_sync")
        dataset = TensorDataset(torch.arange(1.0, 8.0))                  # 7 samples: 4 for worker 0, 3 for worker 1
        sampler = SplitSampler(dataset, store.num_workers, store.rank)
        loader = DataLoader(dataset, batch_size=1, sampler=sampler)
        weight, bias = torch.zeros(2000, 1000), torch.zeros(1)            # one is cut over both servers
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["w", "b"], [weight, bias])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                store.pushpull(["w", "b"], [batch.expand(2000, 1000).contiguous(), batch], [weight, bias])
            last = store.join()
            store.pull(["w", "b"], [weight, bias])
            assert (weight == bias).all()
            count, now = len(loader), bias.item()
            print(f"worker {store.rank}, epoch {epoch}: {count} batches, {last} last, {now:g}", flush=True)
        """
    with job(tmp_path, script) as running:
        assert running.wait() == 0, running.output
    for rank in (0, 1):
        for epoch in range(3):
            line = f"worker {rank}, epoch {epoch}: {4 - rank} batches, 0 last, {-28 * (epoch + 1)}"
            assert line in running.output


def test_a_worker_that_dies_while_another_has_joined(tmp_path: Path) -> None:
    script = """
        import numpy as np
        import kvstore as kv

        store = kv.create("dist_sync")
        weight = np.zeros(10, np.float32)
        store.init("w", weight)
        store.pushpull("w", np.ones_like(weight), out=weight)
        if store.rank == 1:
            print("joins", flush=True)
            store.join(timeout=1000)
        while True:
            store.pushpull("w", np.ones_like(weight), out=weight)
            if weight[0] == 1:                                        # a round without worker 1
                print("alone", flush=True)
    """
    with job(tmp_path, script, servers=1) as running:
        running.until(running.said("alone"), "a round without worker 1")
        (victim,) = running.members("worker", 0)
        os.kill(victim, signal.SIGKILL)
        assert running.wait(PROMPT) != 0
        assert not running.members()
    assert "joins" in running.output
    assert "NodeLost: worker 0" in running.output
