"""``BatchEndParam``, the argument of a batch's callbacks, and the logger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore import UnknownName
from workers.metrics import EvalMetric

# The root logger, as in MXNet: lines begin with INFO:root: unless configured otherwise.
log = logging.getLogger()


class BatchEndParam(NamedTuple):
    """The argument of a batch's callbacks.

    Attributes:
        epoch: the epoch, from 0.
        nbatch: the batch's number in the epoch, from 0; at the end of an evaluation, the number of its batches.
        eval_metric: the metric of this worker's batches; at the end of an evaluation, of all workers' batches.
        locals: by name: ``self`` (the run), its ``trainer`` and ``model``, and while training the batch's ``loss``.
    """

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None
    locals: Mapping[str, Any]

    def value(self, name: str | None = None) -> tuple[str, float]:
        """Return a metric's name and value; for None, the first metric's.

        Raises:
            UnknownName: there is no such metric.
        """
        values = dict(self.eval_metric.get_name_value()) if self.eval_metric else {}
        chosen = next(iter(values), "") if name is None else name
        if chosen not in values:
            raise UnknownName(f"no metric {chosen!r} to monitor; choose from {', '.join(values)}")
        return chosen, values[chosen]
