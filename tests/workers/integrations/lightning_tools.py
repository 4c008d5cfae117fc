"""Lightning over a job's group, from a checkpoint again, and over gloo."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from workers.integrations.lightning import KVStoreStrategy

SAMPLES = 44  # of two workers each has four batches of 5 and one of 2, of which two make a step


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.accuracy = BinaryAccuracy()
        self.seen: list[int] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.layers(batch[1])[:, 0], batch[2])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen += batch[0].tolist()
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.accuracy(self.layers(batch[1])[:, 0], batch[2])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("summed", float(len(batch[0])), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class CountedIO(TorchCheckpointIO):
    """Knows how many checkpoints this process has written."""

    written = 0

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.written += 1
        super().save_checkpoint(*args, **options)


def loader(shuffle: bool = False) -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(torch.arange(SAMPLES), x, (x.sum(1) > 0).float())
    return DataLoader(data, batch_size=5, shuffle=shuffle)


def train(strategy: Strategy, devices: int, folder: Path, resumed: Path | None = None) -> dict[str, Any]:
    pl.seed_everything(3)
    model, saving = Net(), CountedIO()
    trainer = pl.Trainer(
        max_epochs=5,
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        plugins=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1),
            EarlyStopping("val_loss", min_delta=100.0, patience=1),  # after the second epoch
        ],
    )
    trainer.fit(model, loader(shuffle=True), loader(), ckpt_path=resumed)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return {
        "rank": [trainer.global_rank, trainer.world_size],
        "weights": hashlib.sha256(weights).hexdigest(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": [trainer.global_step, trainer.current_epoch],
        "seen": model.seen[: SAMPLES // 2],
        "written": saving.written,
    }


def in_a_job(folder: Path) -> dict[str, Any]:
    ours = train(KVStoreStrategy(), 1, folder / "ours")
    again = train(KVStoreStrategy(), 1, folder / "again", folder / "ours" / "saved" / "epoch=0.ckpt")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    names: dict[str, Any] = {"Trainer": partial(pl.Trainer, accelerator="cpu", **quiet)}
    exec((folder / "page.py").read_text(), names)  # the documentation's, which makes a trainer
    names["trainer"].fit(Net(), loader())
    return {"ours": ours, "again": again, "page": names["trainer"].global_step}


def over_gloo(folder: Path) -> dict[str, Any]:
    return train(DDPStrategy(), dist.get_world_size(), folder / "theirs")
