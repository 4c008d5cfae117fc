"""What callbacks are given: a run, and ``BatchEndParam`` after a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from kvstore import UnknownName
from kvstore.job.config import Config
from workers.metrics import EvalMetric

MODES = ("auto", "max", "min")


def improves(name: str, value: float, best: float | None, mode: str, least: float = 0.0) -> bool:
    """Whether ``value`` is better than ``best``, by more than ``least``. NaN never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    upwards = ("accuracy" in name or "auc" in name) if mode == "auto" else mode == "max"
    return value > best + least if upwards else value < best - least


class Run(Protocol):
    """What callbacks use of a run of ``fit``, which ``begin`` gives them."""

    rank: int
    epoch: int
    samples: int
    history: list[dict[str, float]]

    @property
    def trainer(self) -> Any: ...

    @property
    def num_batches(self) -> int | None: ...

    @property
    def evaluates(self) -> bool: ...

    def stop(self) -> None: ...

    def save(self, prefix: str, epoch: int, batch: int = 0) -> bool: ...

    def remove(self, prefix: str, epoch: int) -> None: ...


class BatchEndParam(NamedTuple):
    """The argument of a batch's callbacks.

    Attributes:
        epoch: the epoch, from 0.
        nbatch: the batch's number in the epoch, from 0; at the end of an evaluation, the number of its batches.
        eval_metric: the metric of this worker's batches; at the end of an evaluation, of all workers' batches.
        locals: by name: ``self`` (the run), its ``trainer`` and ``model``, the ``moment`` (``batch``, ``eval batch`` or
            ``eval``), and after a batch its ``loss``.
    """

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None
    locals: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """This worker's rank. Outside of ``fit`` it is the rank that the environment names, or 0."""
        run = self.locals.get("self")
        if run is not None:
            return int(run.rank)
        config = Config.from_env()
        return config.ranks.rank if config.ranks else max(0, config.rank_hint)

    def value(self, name: str | None = None) -> tuple[str, float]:
        """Return the name and the value of the metric ``name``; for None, of the first metric.

        Raises:
            UnknownName: there is no such metric.
        """
        values = dict(self.eval_metric.get_name_value()) if self.eval_metric else {}
        chosen = next(iter(values), "") if name is None else name
        if chosen not in values:
            raise UnknownName(f"no metric {chosen!r} to monitor; choose from {', '.join(values)}")
        return chosen, values[chosen]
