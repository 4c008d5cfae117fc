"""What others' tools do in a job, and after it over gloo in the same processes. Each worker prints JSON.

``python -m workers.integrations`` runs it. Its imports are in functions: processes that loaders spawn import it, too.
"""

from __future__ import annotations

import json
from pathlib import Path


def load_and_save(folder: Path) -> int:
    """Train with loaders that have processes, and save and load as torch does; return the number of updates."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.utils.data import DataLoader, TensorDataset

    from workers import Trainer

    model = torch.nn.Linear(4, 2)
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, kvstore="dist_sync")
    data = TensorDataset(torch.ones(4, 4), torch.zeros(4, 2))
    for method in ("fork", ("spawn", "forkserver")[dist.get_rank()]):
        loader = DataLoader(data, 2, num_workers=1, multiprocessing_context=method, persistent_workers=True)
        for _ in range(2):
            for x, y in loader:
                trainer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                trainer.step()
        del loader
    for name, options in (("all", {}), (f"of-{dist.get_rank()}", {"no_dist": True})):
        dcp.save(model.state_dict(), checkpoint_id=folder / name, **options)
        loaded = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        dcp.load(loaded, checkpoint_id=folder / name, **options)
        assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    return trainer.num_update


def main(folder: Path) -> None:
    import torch.distributed as dist

    found = {"torch": load_and_save(folder)}
    import huggingface_tools
    import lightning_tools

    found["huggingface"] = huggingface_tools.in_a_job(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # Lightning's strategy makes it anew
    found["lightning"] = lightning_tools.in_a_job(folder)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    for tools in (huggingface_tools, lightning_tools):
        found[tools.__name__.removesuffix("_tools")]["theirs"] = tools.over_gloo(folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path.cwd())
