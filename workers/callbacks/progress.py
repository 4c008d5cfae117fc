"""What ``fit`` prints (MXNet's log lines, a progress bar), and learning rates by epoch."""

from __future__ import annotations

import base64
import io
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kvstore import UsageError, WireError
from kvstore.job.config import Config
from workers.callbacks.param import BatchEndParam, Run
from workers.common import bundle
from workers.common.run_log import log_line
from workers.common.torch_internals import set_in_group

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW_S = 0.1
_LINE_S = 10.0  # between lines, where there is no bar
_AROUND = 40  # columns beside the bar itself: process, epoch, count, time


class ProgressBar:
    """Shows the progress of the epoch on rank 0; a ``batch_end_callback``. Log lines appear above the bar.

    The bar is on the terminal of the process, or on that of ``launch.py``, also if the process is on another host. rich
    draws it (``pip install rich``). Without a terminal, and without rich, a line is logged every ten seconds instead.
    (MXNet's bar fills log files.)

    Args:
        total: the number of batches in an epoch; None for what the training data says, if it does.
        length: the width of the bar, in characters, where the terminal is wide enough.
    """

    def __init__(self, total: int | None = None, length: int = 80) -> None:
        self.total, self.length = total, length
        self._bar: Bar | None = None

    def begin(self, run: Run) -> None:
        """Take the number of batches from ``run``."""
        if self.total is None:
            self.total = run.num_batches

    def __call__(self, param: BatchEndParam) -> None:
        if self._bar is None:
            self._bar = _choose(param.rank, self.length)
        self._bar.show(param, self.total)

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.end()
            self._bar = None


Bar: TypeAlias = "TerminalBar | RelayedBar | ProgressLines"


def _choose(rank: int, length: int) -> Bar:
    if rank == 0 and find_spec("rich") is not None:
        if sys.stderr.isatty():
            return TerminalBar(length)
        columns = Config.from_env().columns
        if columns and _is_pipe():
            return RelayedBar(length, columns)
    return ProgressLines()


def _is_pipe() -> bool:
    """Whether standard error is a pipe, as it is if ``launch.py`` shows it; the program may have redirected it."""
    try:
        return stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class TerminalBar:
    """A bar on this process's own terminal. What the process writes to standard error appears above it."""

    def __init__(self, length: int) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._progress = _progress(console, length, live=True)
        handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        self._redirected = [handler for handler in handlers if handler.stream is sys.stderr]
        self._progress.start()  # rich replaces sys.stderr by a stream that prints above the bar
        for handler in self._redirected:
            handler.setStream(sys.stderr)
        self._task = self._progress.add_task("")

    def show(self, param: BatchEndParam, total: int | None) -> None:
        _update(self._progress, self._task, param, total)

    def end(self) -> None:
        self._progress.stop()
        for handler in self._redirected:
            handler.setStream(sys.stderr)


class RelayedBar:
    """A bar on the terminal of ``launch.py``, which shows what ends with a carriage return below all lines."""

    def __init__(self, length: int, columns: int) -> None:
        from rich.console import Console

        self._console = Console(file=io.StringIO(), force_terminal=True, width=columns)
        self._progress = _progress(self._console, length, live=False)
        self._task = self._progress.add_task("")
        self._drawn = -_REDRAW_S

    def show(self, param: BatchEndParam, total: int | None) -> None:
        _update(self._progress, self._task, param, total)
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S or param.nbatch + 1 == total:
            self._drawn = now
            with self._console.capture() as capture:
                self._console.print(self._progress.get_renderable())
            sys.stderr.write(capture.get().strip("\n") + "\r")
            sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write(" \r")
        sys.stderr.flush()


class ProgressLines:
    """A line every ten seconds, for want of a terminal."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def show(self, param: BatchEndParam, total: int | None) -> None:
        now, done = time.monotonic(), param.nbatch + 1
        if now - self._since >= _LINE_S:
            self._since = now
            of = f" of {total} batches ({done / total:.0%})" if total else " batches"
            log_line(param.rank, "Epoch[%d] %d%s", param.epoch, done, of)

    def end(self) -> None:
        pass  # nothing is shown


def _progress(console: Any, length: int, live: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = BarColumn(max(1, min(length, console.width - _AROUND)))
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=live, transient=True)


def _update(progress: Progress, task: Any, param: BatchEndParam, total: int | None) -> None:
    progress.update(task, completed=param.nbatch + 1, total=total, description=f"Epoch {param.epoch}")


class LearningRateScheduler:
    """Sets the learning rate of each epoch; an ``epoch_end_callback``, on every worker.

    For a rate by the number of updates, use ``lr_scheduler`` in ``optimizer_params``.

    Args:
        schedule: a function from the epoch, counted from 0, to its learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        self._schedule = schedule
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Set the rate of the first epoch of ``run``."""
        self._run = run
        run.trainer.set_learning_rate(self._schedule(run.epoch))

    def __call__(self, epoch: int, *_: Any) -> None:
        if self._run is not None:
            self._run.trainer.set_learning_rate(self._schedule(epoch + 1))


class TorchScheduler:
    """Steps one of torch's learning-rate schedulers whenever it is called; on every worker.

        fit(..., epoch_end_callback=TorchScheduler(lambda optimizer: StepLR(optimizer, step_size=30)))
        fit(..., batch_end_callback=TorchScheduler(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10_000)))
        fit(..., eval_end_callback=TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer, "max")))

    The argument that it is passed as decides when it steps: after each epoch, batch or evaluation. As a
    ``batch_end_callback`` it also catches up, at the end of an epoch, with workers that had more batches. Its state is
    in checkpoints, so that a resumed run has the same rates to the bit.

    Args:
        make: a function from an optimizer to the scheduler.
        monitor: the metric for ``ReduceLROnPlateau``, by name; None for the first metric.

    Raises:
        UsageError: ``make`` is not a function, or does not make a scheduler.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], monitor: str | None = None) -> None:
        if not callable(make) or hasattr(make, "step"):
            raise UsageError(
                "TorchScheduler takes a function from an optimizer to a scheduler, such as "
                f"lambda optimizer: StepLR(optimizer, 30), not {type(make).__name__}"
            )
        self._make, self._monitor = make, monitor
        self._scheduler: Any = None
        self._groups: list[dict[str, Any]] = []
        self._loaded: tuple[Any, list[dict[str, Any]]] | None = None

    def begin(self, run: Run) -> None:
        """Make the scheduler, which sets the first rates of ``run``."""
        optimizer = run.trainer.optimizer
        self._scheduler, self._groups = self._make(optimizer), optimizer.param_groups
        if not all(callable(getattr(self._scheduler, name, None)) for name in ("step", "state_dict")):
            raise UsageError(
                f"TorchScheduler's function must return a scheduler, not a {type(self._scheduler).__name__}"
            )
        if self._loaded is not None:
            state, groups = self._loaded
            try:
                self._scheduler.load_state_dict(state)
                for group, saved in zip(self._groups, groups, strict=True):
                    for name, value in saved.items():  # the new scheduler has set its first rates
                        set_in_group(group, name, value)
            except (AttributeError, LookupError, TypeError, ValueError) as exc:
                kind = type(self._scheduler).__name__
                raise UsageError(
                    f"the checkpoint's state does not fit this {kind}: {exc!r}; make the scheduler as in the run "
                    "that saved it"
                ) from exc
            self._loaded = None

    @property
    def scheduler(self) -> Any:
        """The scheduler; None before ``begin``."""
        return self._scheduler

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            if not isinstance(when, BatchEndParam):
                raise UsageError("ReduceLROnPlateau needs a metric: pass it as eval_end_callback")
            self._scheduler.step(when.value(self._monitor)[1])
        else:
            self._scheduler.step()

    def missed(self, batches: int) -> None:
        """Make ``batches`` steps, one for each batch that this worker had less than others."""
        for _ in range(batches):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the hyper-parameters that it has set, as JSON values."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        packed, tensors = bundle.pack([self._scheduler.state_dict(), groups])
        if any(tensor.numel() != 1 for tensor in tensors):
            raise UsageError(
                "the scheduler's state has tensors of several elements, which a checkpoint cannot hold; create it "
                "with numbers"
            )
        # A rate that is a tensor is rounded to its dtype at each step, so it comes back as one.
        numbers = [tensor.item() for tensor in tensors]
        return {"bundle": base64.b64encode(packed).decode(), "tensors": numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which ``state_dict`` returned; before ``begin``.

        Raises:
            UsageError: the state is damaged.
        """
        try:
            packed = base64.b64decode(state["bundle"])
            numbers, forms = state.get("tensors", []), bundle.forms(packed)
            tensors = [
                torch.tensor(number, dtype=form.dtype, device="cpu").reshape(form.shape)
                for number, form in zip(numbers, forms, strict=True)
            ]
            scheduler, groups = bundle.unpack(packed, tensors)
        except (WireError, LookupError, RuntimeError, TypeError, ValueError) as exc:
            raise UsageError(f"the scheduler's state is damaged: {exc!r}") from exc
        self._loaded = scheduler, groups


class Speedometer:
    """Logs a worker's speed, and the metric of its own batches, after every ``frequent`` batches.

    As in MXNet the clock starts when an epoch's first batch ends, so that its start-up time does not count.

    Args:
        batch_size: the samples in a batch of this worker.
        frequent: the number of batches between lines.
        auto_reset: whether each line's metric covers the batches since the last line; otherwise the epoch so far.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._since = self._last = -1
        self._tic = 0.0

    def __call__(self, param: BatchEndParam) -> None:
        begun, self._last = 0 <= self._last < param.nbatch, param.nbatch
        if not begun:
            self._since, self._tic = param.nbatch, time.perf_counter()
        elif param.nbatch % self.frequent == 0:
            pairs = param.eval_metric.get_name_value() if param.eval_metric else []  # this waits for the device
            now = time.perf_counter()
            speed = (param.nbatch - self._since) * self.batch_size / max(now - self._tic, 1e-9)
            shown = "".join(f"\t{name}={value:f}" for name, value in pairs)
            log_line(
                param.rank, "Epoch[%d] Batch [%d]\tSpeed: %.2f samples/sec%s", param.epoch, param.nbatch, speed, shown
            )
            if param.eval_metric and self.auto_reset:
                param.eval_metric.reset_local()
            self._since, self._tic = param.nbatch, now


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a callback that logs the metric every ``period`` batches, and then resets it if ``auto_reset``."""

    def callback(param: BatchEndParam) -> None:
        if param.nbatch % period or param.eval_metric is None:
            return
        for name, value in param.eval_metric.get_name_value():
            log_line(param.rank, "Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
        if auto_reset:
            param.eval_metric.reset_local()

    return callback


class LogValidationMetricsCallback:
    """Logs the metric at the end of an evaluation; ``fit`` itself also does."""

    def __call__(self, param: BatchEndParam) -> None:
        for name, value in param.eval_metric.get_name_value() if param.eval_metric else []:
            log_line(param.rank, "Epoch[%d] Validation-%s=%f", param.epoch, name, value)
