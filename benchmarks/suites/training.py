"""Training steps on one machine, compared with a single process and with torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders import Contender, Steps
from benchmarks.figures import Result
from benchmarks.session import Case, Session

STEPS = {"resnet8": 100, "resnet18": 10}
TITLES = {"resnet8": "ResNet-8, 0.1 M parameters", "resnet18": "ResNet-18, 11 M parameters"}
ALONE = "alone"


def train(session: Session, models: Sequence[str] = tuple(STEPS)) -> None:
    """Measure two workers with two servers, two processes of ddp, and one process; a batch of 16 each.

    Each process has half of the cores, as ``launch.py`` divides them; torchrun would give ddp's one thread each.
    """
    for model in models:
        steps = session.options.rounds or STEPS[model]
        contenders: list[Contender] = [
            Steps(model, "ours", steps, "kvstore"),
            Steps(model, "group", steps, "ddp over kvstore"),
        ]
        if "gloo" in session.peers:
            contenders.append(Steps(model, "ddp", steps, "ddp"))
        contenders.append(Steps(model, "alone", steps, ALONE))
        title = f"A training step of {TITLES[model]}, batch 16, 2 workers, 2 servers"
        session.measure(Case(f"train-{model}", title, contenders, ("ddp", ALONE), note_efficiency))


def note_efficiency(result: Result) -> None:
    """Note the speed of each process of two, as a fraction of a single process's."""
    for row in result.rows:
        ratio = result.ratio(row.name, ALONE)
        if ratio and row.name != ALONE:
            row.note = f"efficiency {1 / ratio:.2f}"
