"""What the callbacks of a batch are told, and where they log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore import UnknownName
from workers.metrics import EvalMetric

# The root logger, as in MXNet: a line begins with INFO:root: where nothing else is configured.
log = logging.getLogger()


class BatchEndParam(NamedTuple):
    """What the callbacks of a batch are told.

    Attributes:
        epoch: counted from 0.
        nbatch: the batch's number in the epoch, from 0; at the end of an evaluation, how many there were.
        eval_metric: the metric, of this worker's own batches; at the end of an evaluation, of all workers.
        locals: by name: ``self``, the run, and its ``trainer`` and ``model``; while training, the batch's ``loss``.
    """

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None
    locals: Mapping[str, Any]

    def value(self, name: str | None = None) -> tuple[str, float]:
        """Return a metric's name and value; of None, the first one's.

        Raises:
            UnknownName: there is no metric of that name.
        """
        values = dict(self.eval_metric.get_name_value()) if self.eval_metric else {}
        found = next(iter(values), "") if name is None else name
        if found not in values:
            raise UnknownName(f"no metric {found!r} to monitor; choose from {', '.join(values)}")
        return found, values[found]
