"""Workers with different numbers of batches, as real processes; and one that dies while another waits in join."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import job
from waiting import PROMPT


@pytest.mark.release
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


@pytest.mark.release
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


@pytest.mark.release
def test_replicas_are_equal_after_uneven_batches_and_other_rates_or_stores_are_named(tmp_path: Path) -> None:
    script = """
        import os
        import torch
        from torch import nn
        import kvstore as kv
        import workers

        rank, _ = workers.init()
        model = nn.Linear(4, 1)                                          # with a seed of its own on each worker
        optimizer = workers.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for epoch in range(2):
            for batch in range(5 if rank == epoch else 2):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4) * (rank + 1)).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            last = workers.join(optimizer)
            scheduler.load_state_dict(workers.broadcast_object(scheduler.state_dict(), last))
            scaler.load_state_dict(workers.broadcast_object(scaler.state_dict(), last))
        print("replica", model.weight.tolist(), model.bias.tolist(), optimizer.param_groups[0]["lr"], flush=True)
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.75
        try:
            model(torch.ones(2, 4)).mean().backward()
        except kv.Mismatch as error:
            print("named:", error, flush=True)
        if rank == 1:
            alone = kv.create("dist_sync")
        store = kv.create("dist_sync")
        store.init("w", torch.zeros(3))
        store.pushpull("w", torch.ones(3))
        """
    with job(tmp_path, script) as running:
        assert running.wait() == 1, running.output
    replicas = {line.partition("replica")[2] for line in running.output.splitlines() if "replica [[" in line}
    assert len(replicas) == 1, running.output
    assert running.output.count("named: workers disagree on the learning rate") == 2, running.output
    assert "store of worker 0 is a 'dist_sync' store" in running.output, running.output
