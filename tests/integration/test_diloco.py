"""DiLoCo as a real job: two processes, two servers, fragments on their way while workers train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import job
from models import network
from plain_diloco import diloco

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
