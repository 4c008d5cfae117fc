"""Loaders with processes of their own, in a job: ``fit`` divides the data, and goes on within an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job


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
