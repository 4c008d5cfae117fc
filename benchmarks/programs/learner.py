"""A worker that trains a small network, and may be killed: how many samples have counted, and when.

Each step sleeps for most of its time. So processes that start on the same cores hardly slow it down, as if each worker
had an accelerator of its own. What trains, and its samples, are the same for all who are compared: see ``torchft_job``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.jobs import ROOT
from benchmarks.models import resnet8
from benchmarks.programs.stopwatch import report

sys.path.insert(0, str(ROOT / "examples"))

from digits import pictures
from lm import text
from lm.transformer import Transformer

BATCH, CONTEXT = 8, 32
INNER_STEPS, QUORUM = 50, 2
LAYERS, HEADS, WIDTH = 2, 2, 32
HELD_OUT = 64  # batches that the loss at the end is of

Inputs = tuple[Tensor, Tensor]
OfNumber = Callable[[int], None]


class Work(Protocol):
    """What is trained: ``module`` gives the loss of a batch."""

    module: nn.Module
    lr: float

    def batch(self, rank: int, step: int) -> Inputs:
        """Return what a worker trains on in a step."""

    def held_out(self) -> Iterator[Inputs]:
        """Return batches that nobody trains on."""


class Characters:
    """The character model of ``examples/lm``, on this project's changelog."""

    lr = 2e-3

    def __init__(self) -> None:
        self._corpus = text.load([ROOT / "CHANGELOG.md"], CONTEXT)
        model = Transformer(len(self._corpus.characters), CONTEXT, LAYERS, HEADS, WIDTH)
        self.module: nn.Module = Loss(model, model.loss)

    def batch(self, rank: int, step: int) -> Inputs:
        """See ``Work``."""
        return text.training_batch(self._corpus.training, BATCH, CONTEXT, seed=rank, step=step, rank=rank)

    def held_out(self) -> Iterator[Inputs]:
        """See ``Work``."""
        batches = text.validation_batches(self._corpus.validation, BATCH, CONTEXT, rank=0, workers=1)
        yield from (batch for _, batch in zip(range(HELD_OUT), batches, strict=False))


class Digits:
    """ResNet-8, on handwritten digits as pictures of 32 x 32."""

    lr = 2e-3

    def __init__(self) -> None:
        self._training, self._validation = (
            (_as_images(part.images), torch.from_numpy(part.labels)) for part in pictures.read()
        )
        model = resnet8()
        self.module: nn.Module = Loss(model, lambda images, labels: cross_entropy(model(images), labels))

    def batch(self, rank: int, step: int) -> Inputs:
        """See ``Work``."""
        images, labels = self._training
        order = torch.Generator().manual_seed(step << 8 | rank)
        chosen = torch.randint(len(labels), (BATCH,), generator=order)
        return images[chosen], labels[chosen]

    def held_out(self) -> Iterator[Inputs]:
        """See ``Work``."""
        yield self._validation


class Loss(nn.Module):
    """A model and its loss as one module, as DDP needs it."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        return self._loss(inputs, targets)


WORKS: dict[str, Callable[[], Work]] = {"characters": Characters, "digits": Digits}


def parser() -> argparse.ArgumentParser:
    """Return a parser with the options of all learners."""
    made = argparse.ArgumentParser()
    made.add_argument("--work", choices=sorted(WORKS), default="characters")
    made.add_argument("--seconds", type=float, required=True, help="how long the job trains")
    made.add_argument("--step-s", type=float, required=True, help="how long a step takes")
    made.add_argument("--folder", type=Path, required=True, help="in which each worker notes its samples")
    made.add_argument("--report", type=Path, required=True)
    return made


def prepare(name: str) -> Work:
    """Make the model, the same in each process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return WORKS[name]()


@contextlib.contextmanager
def notes(folder: Path, rank: int) -> Iterator[OfNumber]:
    """Give what notes that samples have counted. A process that starts notes none first."""
    with (folder / f"samples-{rank}").open("a", buffering=1) as samples:

        def note(count: int) -> None:
            print(time.time(), count, file=samples)

        note(0)
        yield note


def backward(called: nn.Module, batch: Inputs, step_s: float) -> None:
    """Compute gradients; take as long as ``step_s``, and sleep for the rest of it."""
    began = time.monotonic()
    loss = called(*batch)
    time.sleep(max(0.0, step_s - 2 * (time.monotonic() - began)))  # backward takes about as long as forward
    loss.backward()


def held_out_loss(work: Work) -> float:
    """Return the mean loss on what nobody has trained on, with its own statistics where there are batch norms."""
    with torch.no_grad():
        losses = [float(work.module(*batch)) for batch in work.held_out()]
    return sum(losses) / len(losses)


def main() -> None:
    """Train until the time is over; the first worker that is left says what the loss is."""
    import kvstore as kv  # torchft's environment, which runs what is above, has none

    options = parser()
    options.add_argument("--way", choices=["sync", "diloco"], required=True)
    options.add_argument("--slow", type=int, default=-1, help="the rank whose steps take twice as long")
    args = options.parse_args()
    work = prepare(args.work)
    rule: dict[str, Any] = {"quorum": QUORUM, "late": "keep", "grace": 2 * args.step_s} if args.way == "diloco" else {}
    store = kv.create("dist_sync", **rule)
    step_s = args.step_s * (2 if store.rank == args.slow else 1)

    def gradients(step: int) -> None:
        work.module.zero_grad()
        backward(work.module, work.batch(store.rank, step), step_s)

    with notes(args.folder, store.rank) as note:
        (sync if args.way == "sync" else diloco)(args, store, work, gradients, note)
    if store.rank == store.members()[0]:
        report(args.report, loss=held_out_loss(work))
    store.barrier()


def sync(args: argparse.Namespace, store: Any, work: Work, gradients: OfNumber, note: OfNumber) -> None:
    """Make as many rounds as the time has steps; note each when it is over."""
    from workers import Trainer

    trainer = Trainer(work.module.named_parameters(), "adamw", {"learning_rate": work.lr}, store)
    trainer.come_back()
    while trainer.num_update < args.seconds / args.step_s:
        gradients(trainer.num_update)
        trainer.step()
        note(BATCH)


def diloco(args: argparse.Namespace, store: Any, work: Work, gradients: OfNumber, note: OfNumber) -> None:
    """Train until the time is over, which begins with the first worker; note what has been sent."""
    from workers import DiLoCo

    inner = torch.optim.AdamW(work.module.parameters(), lr=work.lr)
    outer = DiLoCo(work.module, inner, store, INNER_STEPS, weight="samples")
    outer.come_back()
    end = args.folder / "end"
    with contextlib.suppress(FileExistsError), end.open("x") as file:
        file.write(str(time.time() + args.seconds))
    while not end.read_text():
        time.sleep(0.01)
    until, rounds, unsent = float(end.read_text()), 0, 0
    while time.time() < until:
        gradients(outer.steps)
        outer.step(samples=BATCH)
        unsent += BATCH
        if outer.rounds > rounds:
            note(unsent)
            rounds, unsent = outer.rounds, 0
    outer.finish()
    note(unsent)


def _as_images(shades: Any) -> Tensor:
    """Return pictures of 8 x 8 as float32 of 3 x 32 x 32, each pixel as a square."""
    grey = torch.from_numpy(shades).float().div(pictures.SHADES).sub(0.5)
    return grey.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1).expand(-1, 3, -1, -1).contiguous()


if __name__ == "__main__":
    main()
