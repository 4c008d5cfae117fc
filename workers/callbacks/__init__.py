"""Callbacks of ``fit``: what happens after batches and epochs; MXNet's ``callback``, with its names and its lines.

A batch's callbacks are called with a ``BatchEndParam``, an epoch's with the epoch, the model, and its parameters and
buffers by name. A callback that is an object may have more:

- ``begin(run)`` is called before the first epoch, with what ``fit`` is made of (``workers/fitting/run.py``);
- ``missed(batches)``, of a batch's callbacks, at the end of an epoch of which others have had more batches;
- ``end()`` after the last epoch, whatever ended it;
- what ``state_dict()`` returns goes into checkpoints, and to ``load_state_dict(state)`` when training is resumed.

Of one moment they are called in the order given, but checkpoints are saved when all others have been called.
"""

from workers.callbacks.lines import LogValidationMetricsCallback, Speedometer, log_train_metric
from workers.callbacks.param import BatchEndParam
from workers.callbacks.progress import ProgressBar
from workers.callbacks.rates import LearningRateScheduler, TorchScheduler
from workers.callbacks.saving import do_batch_checkpoint, do_checkpoint
from workers.callbacks.stopping import EarlyStopping

__all__ = [
    "BatchEndParam",
    "EarlyStopping",
    "LearningRateScheduler",
    "LogValidationMetricsCallback",
    "ProgressBar",
    "Speedometer",
    "TorchScheduler",
    "do_batch_checkpoint",
    "do_checkpoint",
    "log_train_metric",
]
