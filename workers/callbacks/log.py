"""``Log``: a run's values to trackers, from ``fit``, a loop with a ``Trainer``, or any other loop; on rank 0."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, cast

from kvstore import UsageError
from kvstore.member.shared_session import joined
from kvstore.rare_log import worth_a_line
from workers.callbacks.param import BatchEndParam, Run
from workers.callbacks.trackers import Tracker, tracker_by_path
from workers.common.checks import at_least

log = logging.getLogger(__name__)

RESERVED = ("step", "wall_time")  # columns that files have anyway


class Log:
    """Passes a run's values on to trackers: JSON lines, CSV, TensorBoard, or any other. Only rank 0 has trackers.

        log = callbacks.Log("run.csv", "runs/first/")
        fit(..., batch_end_callback=log, epoch_end_callback=log, eval_end_callback=log)

    and in a loop of your own, on every worker:

        with callbacks.Log("run.jsonl") as log:
            for batch in batches:
                ...
                log.log({"loss": loss, "learning_rate": trainer.learning_rate}, step=trainer.num_update)

    From ``fit`` it gets, by the moments that it is passed for, at step ``trainer.num_update``:

    - batch, every ``frequent`` steps: ``batch/loss`` and ``batch/METRIC`` of rank 0's own batches,
      ``batch/samples_per_s`` of rank 0 (without its evaluations), ``learning_rate`` and ``epoch``;
    - epoch: ``train/METRIC`` of all workers' data, ``epoch``, and ``validation/METRIC`` if there was an evaluation;
    - eval: ``validation/METRIC`` of all workers' data at once, and ``epoch``.

    A tracker that fails, because a disk is full or a service is down, does not end the training: what it raises is
    logged as a warning. What the function that makes it raises does end the run, at the first value.

    Trackers are closed at the end of ``fit``, or of the ``with`` block around it, and when the program ends. After that
    the next value makes new ones.

    Args:
        trackers: where to. Each is a function without arguments that makes a ``Tracker``; it is called on rank 0 only,
            at the first value. A path stands for one of ours, by its end: ``.jsonl``, ``.csv``, or ``/`` for a folder
            for TensorBoard.
        frequent: the number of steps of ``fit`` from one logged batch to the next.
        rank: this worker's rank. None for what ``fit`` says, or the environment.

    Raises:
        UsageError: there is no tracker, or one is neither a function nor a path.
        UnknownName: a path has another end.
    """

    def __init__(
        self, *trackers: Callable[[], Tracker] | str | os.PathLike[str], frequent: int = 50, rank: int | None = None
    ) -> None:
        if not trackers:
            raise UsageError("a Log needs a tracker: a path such as 'run.csv', or a function that makes one")
        self._factories = [_factory(tracker) for tracker in trackers]
        self._frequent = at_least("frequent", frequent, 1)
        self._rank = rank
        self._trackers: list[Tracker] = []
        self._pid = 0  # of the process that has opened them
        self._stays_open = False
        self._failures = 0
        self._run: Run | None = None
        self._batches = 0  # seen, for steps where there is no trainer
        self._epoch: tuple[int, dict[str, float]] | None = None  # step and values of an epoch not yet written
        self._mark = (-1, 0, 0.0)  # an epoch, its samples so far, and when that was

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Pass the values of a step on to all trackers, if this is rank 0. In a job, the job's page shows them, too.

        Args:
            values: numbers by name; also tensors and arrays of one element. On other ranks they are not looked at, so a
                tensor on a GPU is waited for on rank 0 only.
            step: the number of the step, such as ``trainer.num_update``.

        Raises:
            UsageError: a name or a value cannot be logged.
        """
        if self._first_rank() == 0:
            numbers = self._write(values, step)
            if (session := joined()) is not None:  # what is logged for ``fit``, that reports itself
                session.activity.log(numbers)

    def close(self) -> None:
        """Close the trackers. The next value makes them again."""
        atexit.unregister(self.close)
        trackers, self._trackers = self._trackers, []
        if self._pid != os.getpid():
            return  # in a copy of the process they are not ours to close
        for tracker in trackers:
            try:
                tracker.close()
            except Exception:
                self._note_failure(tracker)

    def __enter__(self) -> Log:
        self._stays_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stays_open = False
        self.close()

    # ---- as a callback of ``fit``

    def begin(self, run: Run) -> None:
        """Remember ``run``, whose values these are."""
        self._run = run
        if self._rank is None:
            self._rank = run.rank

    def __call__(self, param: BatchEndParam | int, *_: Any) -> None:
        if not isinstance(param, BatchEndParam):
            self._log_epoch(param)
            return
        if self._rank is None:
            self._rank = param.rank
        moment = param.locals.get("moment", "batch")
        if moment == "eval batch":
            raise UsageError("a Log cannot be an eval_batch_end_callback: pass it as eval_end_callback")
        if moment == "eval":
            self._write_epoch()
            if self._rank == 0:
                self._write({"epoch": param.epoch, **_metrics("validation", param)}, self._step(param))
        else:
            self._log_batch(param)

    def end(self) -> None:
        """Close the trackers after a run, unless a ``with`` block keeps them open."""
        self._write_epoch()  # its evaluation has failed
        self._run = None
        if not self._stays_open:
            self.close()

    # ---- helpers

    def _write(self, values: Mapping[str, Any], step: int) -> dict[str, float]:
        numbers = {_name(name): _number(name, value) for name, value in values.items()}
        step = at_least("step", step, 0)
        if not self._trackers:
            self._make()
        for tracker in self._trackers:
            try:
                tracker.log(dict(numbers), step)
            except Exception:
                self._note_failure(tracker)
        return numbers

    def _log_batch(self, param: BatchEndParam) -> None:
        self._batches += 1
        step, run = self._step(param), param.locals.get("self")
        if self._rank != 0:
            return
        if run is not None and self._mark[0] != param.epoch:  # its first batch: what was before it does not count
            self._mark = (param.epoch, run.samples, time.perf_counter())
        if step % self._frequent:
            return
        values: dict[str, Any] = {"epoch": param.epoch}
        if (loss := param.locals.get("loss")) is not None:
            values["batch/loss"] = _number("batch/loss", loss)  # this waits for the device
        values.update(_metrics("batch", param))
        if run is not None:
            now, (_, samples, tic) = time.perf_counter(), self._mark
            if run.samples > samples:
                values["batch/samples_per_s"] = (run.samples - samples) / max(now - tic, 1e-9)
            self._mark = (param.epoch, run.samples, now)
        if (trainer := param.locals.get("trainer")) is not None:
            values["learning_rate"] = trainer.learning_rate
        self._write(values, step)

    def evaluated(self, param: BatchEndParam) -> None:
        """Log an epoch with its evaluation, if this is a callback of epochs alone.

        Args:
            param: of the evaluation.
        """
        if self._epoch is not None:
            self._epoch[1].update(_metrics("validation", param))
            self._write_epoch()

    def _log_epoch(self, epoch: int) -> None:
        if self._run is None or self._rank != 0 or not self._run.history:
            return
        values: dict[str, float] = {"epoch": epoch}
        for name, value in self._run.history[-1].items():
            kind, _, metric = name.partition("-")
            values[f"{kind}/{metric}"] = value
        self._epoch = self._run.trainer.num_update, values
        if not self._run.evaluates:
            self._write_epoch()

    def _write_epoch(self) -> None:
        if self._epoch is not None:
            (step, values), self._epoch = self._epoch, None
            self._write(values, step)

    def _step(self, param: BatchEndParam) -> int:
        trainer = param.locals.get("trainer")
        return self._batches if trainer is None else int(trainer.num_update)

    def _first_rank(self) -> int:
        if self._rank is None:
            self._rank = BatchEndParam(0, 0, None, {}).rank
        return self._rank

    def _make(self) -> None:
        self._pid = os.getpid()
        try:
            for factory in self._factories:
                self._trackers.append(_checked(factory(), factory))
        except BaseException:
            self.close()
            raise
        # After the trackers' own imports: hooks run in reverse order, and theirs may end what closing them needs.
        atexit.register(self.close)

    def _note_failure(self, tracker: Tracker) -> None:
        self._failures += 1
        if worth_a_line(self._failures):
            log.warning(
                "%s failed, %d times so far; training goes on", type(tracker).__name__, self._failures, exc_info=True
            )


def _checked(tracker: Any, factory: Any) -> Tracker:
    for method in ("log", "close"):
        if not callable(getattr(tracker, method, None)):
            raise UsageError(
                f"{factory} returned {tracker!r}, which has no method {method}(); it must return a tracker, such as "
                "tracker_of(run.log, run.finish)"
            )
    return cast(Tracker, tracker)


def _factory(tracker: Any) -> Callable[[], Tracker]:
    if callable(tracker):
        return tracker  # type: ignore[no-any-return]
    if isinstance(tracker, str | os.PathLike):
        return tracker_by_path(tracker)
    raise UsageError(
        f"{tracker!r} must be a path, or a function that makes a tracker, which only rank 0 calls, such as "
        f"lambda: {type(tracker).__name__}(...)"
    )


def _metrics(kind: str, param: BatchEndParam) -> dict[str, float]:
    pairs = param.eval_metric.get_name_value() if param.eval_metric else []
    return {f"{kind}/{name}": value for name, value in pairs}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not name or name in RESERVED:
        raise UsageError(
            f"{name!r} cannot be the name of a value: it must be a text in one line, and not {' or '.join(RESERVED)}"
        )
    return name


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)
    try:
        number = item() if callable(item) else value
        return number if isinstance(number, int) and not isinstance(number, bool) else float(number)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"the value of {name!r} must be a number, or have one element; it is {value!r}") from None
