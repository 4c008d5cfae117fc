"""Callbacks of ``fit``, after batches and epochs. MXNet's ``callback``, with its names and its log lines.

A batch's callbacks are called with a ``BatchEndParam``. An epoch's are called with the epoch, the model, its parameters
and its buffers, both by name. A callback that is an object may have more methods:

- ``begin(run)``: called before the first epoch with the run (``workers/fitting/fit.py``);
- ``evaluated(param)``: called after each evaluation, and after the callbacks of its end, with their ``param``. The
  evaluation comes after the callbacks of the epoch, so such a callback prints the evaluation's values here;
- ``missed(batches)``, for a batch's callbacks: called at the end of an epoch in which other workers had more batches;
- ``end()``: called after the last epoch, also when the run fails;
- ``state_dict()`` and ``load_state_dict(state)``: the state goes into checkpoints, and comes back on resumption.

Callbacks of one moment are called in the order given. Those that save checkpoints are called last.
"""

from workers.callbacks.log import Log
from workers.callbacks.param import BatchEndParam
from workers.callbacks.progress import (
    LearningRateScheduler,
    LogValidationMetricsCallback,
    ProgressBar,
    Speedometer,
    TorchScheduler,
    log_train_metric,
)
from workers.callbacks.saving import do_batch_checkpoint, do_checkpoint
from workers.callbacks.stopping import EarlyStopping
from workers.callbacks.trackers import CSVRows, JSONLines, TensorBoard, Tracker, tracker_of

__all__ = [
    "BatchEndParam",
    "CSVRows",
    "EarlyStopping",
    "JSONLines",
    "LearningRateScheduler",
    "Log",
    "LogValidationMetricsCallback",
    "ProgressBar",
    "Speedometer",
    "TensorBoard",
    "TorchScheduler",
    "Tracker",
    "do_batch_checkpoint",
    "do_checkpoint",
    "log_train_metric",
    "tracker_of",
]


def __dir__() -> list[str]:
    return list(__all__)
