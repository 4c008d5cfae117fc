"""Real jobs that train: optimizers, DiLoCo, loaders and uneven workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from jobs import job
from models import network
from plain_diloco import diloco
from waiting import PROMPT

# ---- other optimizers in a real job: the servers' operator allows them, and a worker cannot


MODULE = """
from pathlib import Path

import torch

with open(Path(__file__).with_suffix(".imported"), "a") as file:
    print("x", file=file)


class Half(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] / 2 * param.grad
"""

SCRIPT = """
import os
import sys

import torch

import kvstore as kv

store = kv.create("dist_sync")
store.init("w", torch.zeros(3))

os.environ["KVSTORE_OPTIMIZERS"] += ", sneaky=sneaky:Half"
try:
    store.set_optimizer("sneaky")
except kv.UnknownName as exc:
    print("REFUSED:", exc)

store.set_optimizer("half", learning_rate=1.0)
store.push("w", torch.ones(3))
store.pull("w", out := torch.zeros(3))
print("GOT", out.tolist())
"""


@pytest.mark.release
def test_the_servers_operator_decides(tmp_path: Path) -> None:
    for name in ("good", "sneaky"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    with job(
        tmp_path, SCRIPT, workers=1, servers=1, KVSTORE_OPTIMIZERS="good:Half", PYTHONPATH=str(tmp_path)
    ) as running:
        assert running.wait() == 0, running.output
    assert "REFUSED: server 0: no optimizer 'sneaky'; choose from " in running.output
    assert "KVSTORE_OPTIMIZERS allows others" in running.output
    assert "GOT [-0.5, -0.5, -0.5]" in running.output
    assert (tmp_path / "good.imported").read_text() == "x\nx\n", "by the worker and by the server"
    assert (tmp_path / "sneaky.imported").read_text() == "x\n", "by the worker alone"


# ---- DiLoCo as a real job: two processes, two servers, fragments on their way while workers train


HALVES = [(["0.weight", "0.bias"], 2), (["2.weight", "2.bias"], 4)]


@pytest.mark.release
def test_a_job_is_the_algorithm_of_the_paper(tmp_path: Path) -> None:
    script = f"""
        import sys
        import torch
        sys.path.insert(0, {str(Path(__file__).parents[1] / "workers")!r})
        from models import backward, network
        from plain_diloco import inner_adam
        import kvstore as kv
        from workers import DiLoCo

        store = kv.create("dist_sync")
        model = network(store.rank)
        diloco = DiLoCo(model, inner_adam(model.parameters()), store, inner_steps=4, fragments=2, overlap=3)
        for step in range(1, 14):
            backward(model, step, store.rank, 2)
            diloco.step()
        torch.save(model.state_dict(), f"{tmp_path}/weights.{{store.rank}}")
        diloco.finish()
        torch.save(model.state_dict(), f"{tmp_path}/finished.{{store.rank}}")
        """
    with job(tmp_path, script) as running:
        assert running.wait() == 0, running.output
    models = diloco(network(), 2, 13, 4, fragments=HALVES, overlap=3, mixing=0.5)
    for rank, model in enumerate(models):
        saved = torch.load(tmp_path / f"weights.{rank}", weights_only=True)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(saved[name], expected, rtol=0, atol=1e-6, msg=name)
    one, two = (torch.load(tmp_path / f"finished.{rank}", weights_only=True) for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- loaders with processes of their own, in a job: ``fit`` divides the data, and goes on within an epoch


@pytest.mark.release
def test_a_run_goes_on_within_an_epoch_though_its_loader_reads_ahead(tmp_path: Path) -> None:
    script = f"""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import kvstore as kv
        from workers import Checkpoint, callbacks, fit

        class Stop(Exception):
            pass

        class Seen(torch.nn.Linear):
            def forward(self, inputs):
                seen.extend(inputs[:, 0].int().tolist())
                return super().forward(inputs / 48)

        def train(stop=None, **more):
            seen.clear()
            torch.manual_seed(0)
            model = Seen(2, 2)
            loader = DataLoader(data, 4, shuffle=True, num_workers=1, prefetch_factor=4, persistent_workers=True)
            if more:
                next(iter(loader))
            def end(param):
                if (param.epoch, param.nbatch) == stop:
                    raise Stop
            saving = [callbacks.do_batch_checkpoint({str(tmp_path / "model")!r}, 3), end]
            try:
                fit(model, loader, num_epoch=2, kvstore="dist_sync", batch_end_callback=saving, **more)
            except Stop:
                store.barrier()
            return list(seen), model.state_dict()

        store = kv.create("dist_sync")
        numbers = torch.arange(48.0)
        data = TensorDataset(torch.stack([numbers, numbers], 1), (numbers % 2).long())
        seen = []
        whole, weights = train()
        before, _ = train((0, 4))
        after, same = train(resume=Checkpoint({str(tmp_path / "model")!r}, 0, 3))
        assert before[:12] + after == whole, (before, after, whole)
        assert all(torch.equal(weights[name], same[name]) for name in weights)
        told = kv.create("dist_sync")
        told.init("seen", torch.zeros(48))
        once = torch.bincount(torch.tensor(whole), minlength=48).float()
        told.pushpull("seen", once, out=once)
        assert once.tolist() == [2.0] * 48, once
        """
    with job(tmp_path, script, servers=1) as running:
        assert running.wait() == 0, running.output
    assert "each takes its own part; each worker has 24 samples" in running.output


# ---- a worker that dies while another waits in join, and replicas after uneven batches, as real processes


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
