"""accelerate and transformers over a job's group, from checkpoints again, and over gloo.

Nothing here is of this project: ``python -m workers.integrations`` makes the group.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import EarlyStoppingCallback, EvalPrediction, Trainer, TrainingArguments

SAMPLES = 44  # of two workers each has five batches of 5, of which two make a step


class Points(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = self.x[number]
        return {"number": torch.tensor(number), "x": x, "labels": (x.sum() > 0).long()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.seen: list[int] = []

    def forward(self, number: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += number.tolist()
        logits = self.layers(x).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def weights(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()


def accelerated(folder: Path, resume: bool = False) -> dict[str, Any]:
    """Two epochs of a loop of one's own; or the second of them, from where the first has saved."""
    divided = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", dataloader_config=divided)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(Points(), batch_size=10)  # in one order, for accelerate saves none
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder / "state"))
    norms = []
    for epoch in (0, 1)[resume:]:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
    model.eval()
    numbers = [accelerator.gather_for_metrics(batch["number"]) for batch in loader]
    return {
        "rank": [accelerator.process_index, accelerator.num_processes, accelerator.is_main_process],
        "weights": weights(net),
        "norms": norms[-3:],
        "rate": scheduler.get_last_lr(),
        "seen": net.seen[: len(net.seen) // (1 if resume else 2)],
        "evaluated": sorted(torch.cat(numbers).tolist()),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    labels = prediction.label_ids
    return {"accuracy": float((prediction.predictions.argmax(-1) == labels).mean()), "samples": len(labels)}


def trained(folder: Path, resume: bool = False) -> dict[str, Any]:
    """Two epochs, of five; or the second of them, from where the first has saved."""
    net = Net()
    trainer = Trainer(
        net,
        TrainingArguments(
            str(folder / "trainer"),
            num_train_epochs=5,
            per_device_train_batch_size=5,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=0.1,
            lr_scheduler_type="linear",
            bf16=True,
            use_cpu=True,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            logging_steps=1,
            label_names=["labels"],
            remove_unused_columns=False,
            metric_for_best_model="accuracy",
            load_best_model_at_end=True,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Points(),
        eval_dataset=Points(),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=100.0)],  # after the second epoch
    )
    trainer.train(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-3") if resume else None)
    timed = ("runtime", "per_second", "flos")
    history = [{k: v for k, v in line.items() if not any(t in k for t in timed)} for line in trainer.state.log_history]
    return {
        "rank": [trainer.args.process_index, trainer.args.world_size, trainer.is_world_process_zero()],
        "weights": weights(net),
        "history": history,
        "steps": trainer.state.global_step,
        "seen": net.seen[: len(net.seen) // (1 if resume else 2)],
        "saves": trainer.args.should_save,
    }


def in_a_job(folder: Path) -> dict[str, Any]:
    ours = accelerated(folder / "ours"), trained(folder / "ours")
    return {"ours": ours, "again": (accelerated(folder / "ours", resume=True), trained(folder / "ours", resume=True))}


def over_gloo(folder: Path) -> list[dict[str, Any]]:
    return [accelerated(folder / "theirs"), trained(folder / "theirs")]
