"""Where a progress bar is drawn, that log lines stay above it, and lines where there is none."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import screen
import torch
from callback_runs import Run, param, right
from fitted import SGD, loader, network, require_resumable, state
from threaded import ThreadedJob
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import kvstore as kv
from workers import Checkpoint, Reducer, callbacks, fit, metrics
from workers.callbacks import BatchEndParam, ProgressBar, Speedometer, progress


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The root logger as in a program that has called basicConfig."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(sys.stderr)])
    level = root.level
    root.setLevel(logging.INFO)
    yield root
    root.setLevel(level)


def bar(root: logging.Logger) -> None:
    shown = ProgressBar(length=20)
    shown.begin(Run(num_batches=3))
    for number in range(3):
        shown(param(number, epoch=5))
        root.info("[bold]line %d[/bold]", number)
    shown.end()
    root.info("after it")


def test_lines_alone_where_there_is_no_terminal(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root.handlers[0].setStream(sys.stderr)
    bar(root)
    assert capsys.readouterr().err == "".join(f"[bold]line {n}[/bold]\n" for n in range(3)) + "after it\n"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_under_the_lines_on_a_terminal(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Screen()
    monkeypatch.setattr(sys, "stderr", written)
    root.handlers[0].setStream(written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    bar(root)
    text = written.getvalue()
    assert "[bold]line 1[/bold]" in text
    assert "Epoch 5" in text
    assert "3/3" in text
    assert text.endswith("after it\n")
    assert root.handlers[0].stream is written


@contextmanager
def relayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error as launch.py on a terminal reads it; gives the end to read from."""
    monkeypatch.setenv("KVSTORE_COLUMNS", "60")
    read, write = os.pipe()
    os.set_blocking(read, False)
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield read
    os.close(read)


def shown_by(bar: ProgressBar, *params: BatchEndParam) -> None:
    bar.begin(Run(num_batches=3))
    for each in params:
        bar(each)
    bar.end()


def test_a_bar_that_launch_py_shows_is_rewritten_by_carriage_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    with relayed(monkeypatch) as pipe:
        shown_by(ProgressBar(), *(param(number, epoch=5) for number in range(3)))
        first, last, blank, rest = os.read(pipe, 1 << 16).decode().split("\r")
    assert [rest, blank.strip()] == ["", ""]
    for text, count in ((first, "1/3"), (last, "3/3")):  # the second is less than a tenth of a second after the first
        (line,) = screen.seen(text)
        assert line.startswith("Epoch 5 ━")
        assert count in line
        assert len(line) <= 60


def test_no_bar_of_other_ranks_nor_in_a_file_nor_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with relayed(monkeypatch) as pipe:
        with monkeypatch.context() as patched:
            patched.setenv("DMLC_TASK_ID", "1")
            shown_by(ProgressBar(), param(0))
        with monkeypatch.context() as patched:
            patched.setattr(progress, "find_spec", lambda _: None)
            shown_by(ProgressBar(), param(0))
        with pytest.raises(BlockingIOError):
            os.read(pipe, 1)
    shown_by(ProgressBar(), param(0))
    assert capsys.readouterr().err == ""


def test_a_line_every_ten_seconds_where_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    known, unknown = ProgressBar(), ProgressBar()
    known.begin(Run(num_batches=8))
    for number in range(8):
        for each in (known, unknown):
            each(param(number, epoch=1))
        now += 4
    assert caplog.messages == [
        "Epoch[1] 4 of 8 batches (50%)",
        "Epoch[1] 4 batches",
        "Epoch[1] 7 of 8 batches (88%)",
        "Epoch[1] 7 batches",
    ]


# ---- MXNet's log lines: speed and metrics


class Clock:
    """Time that goes on by half a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.5
        return self.now


def test_speedometer_prints_the_labs_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "time", Clock())
    caplog.set_level(logging.INFO)
    metric = metrics.create("acc")
    speedometer = Speedometer(batch_size=128, frequent=20)
    for epoch in (0, 1):
        metric.reset()
        for number in range(41):
            speedometer(param(number, right(metric, 32 if number <= 20 else 64, 128), epoch))
    assert caplog.messages == [
        f"Epoch[{epoch}] Batch [{number}]\tSpeed: 5120.00 samples/sec\taccuracy={accuracy}"
        for epoch in (0, 1)
        for number, accuracy in ((20, "0.250000"), (40, "0.500000"))
    ]
    assert {record.name for record in caplog.records} == {"root"}


def test_speedometer_without_reset_of_several_and_of_no_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "time", Clock())
    caplog.set_level(logging.INFO)
    metric = metrics.create(["acc", metrics.CustomMetric(lambda *_: 2.0, "two")])
    whole, none = Speedometer(1, 1, auto_reset=False), Speedometer(1, 1)
    for number in range(3):
        whole(param(number, right(metric, number, 2)))
    none(param(0))
    none(param(1))
    assert caplog.messages == [
        "Epoch[0] Batch [1]\tSpeed: 2.00 samples/sec\taccuracy=0.250000\ttwo=2.000000",
        "Epoch[0] Batch [2]\tSpeed: 2.00 samples/sec\taccuracy=0.500000\ttwo=2.000000",
        "Epoch[0] Batch [1]\tSpeed: 2.00 samples/sec",
    ]


def test_a_resumed_epochs_first_line_counts_only_what_was_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "time", Clock())
    caplog.set_level(logging.INFO)
    speedometer = Speedometer(10, 20)
    for number in range(15, 21):
        speedometer(param(number))
    assert caplog.messages == ["Epoch[0] Batch [20]\tSpeed: 100.00 samples/sec"]


def test_log_train_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metric = metrics.create("acc")
    log, resetting = callbacks.log_train_metric(2), callbacks.log_train_metric(2, auto_reset=True)
    for number in range(3):
        for callback in (log, resetting):
            callback(param(number, right(metric, number, 2)))
    callbacks.LogValidationMetricsCallback()(param(0, right(metrics.create("acc"), 1, 2), epoch=4))
    assert caplog.messages == [
        "Iter[0] Batch[0] Train-accuracy=0.000000",
        "Iter[0] Batch[0] Train-accuracy=0.000000",
        "Iter[0] Batch[2] Train-accuracy=0.666667",
        "Iter[0] Batch[2] Train-accuracy=0.750000",
        "Epoch[4] Validation-accuracy=0.500000",
    ]


# ---- Torch's schedulers as callbacks


def _warm(optimizer: torch.optim.Optimizer) -> Any:
    first, second = LambdaLR(optimizer, lambda done: 0.1 * (1 + done)), ExponentialLR(optimizer, 0.9)
    return SequentialLR(optimizer, [first, second], [3])


def _with_a_tensor(optimizer: Any) -> Any:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    return ExponentialLR(optimizer, 0.9)


SCHEDULERS: dict[str, tuple[str, Any]] = {
    "by epoch": ("epoch", lambda optimizer: StepLR(optimizer, 1, 0.5)),
    "milestones": ("batch", lambda optimizer: MultiStepLR(optimizer, [4, 9])),
    "with momentum": ("batch", lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=15)),
    "cosine": ("batch", lambda optimizer: CosineAnnealingLR(optimizer, 15)),
    "one after another": ("batch", _warm),
    "a tensor, whose roundings are its own": ("batch", _with_a_tensor),
    "plateau": ("eval", lambda optimizer: ReduceLROnPlateau(optimizer, "max", patience=0)),
}


@pytest.mark.parametrize("which", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")  # torch 2.5's SequentialLR, in itself
def test_torchs_schedulers_go_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, which: str) -> None:
    """Shares are uneven: 5 batches and 3."""
    prefix = str(tmp_path / "model")
    moment, make = SCHEDULERS[which]

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, rates = network(seed=store.rank + 2 * (resume is not None)), []
        data = loader(20 if store.rank == 0 else 12, 4)

        def note(at: Any, *_: Any) -> None:
            rates.append((getattr(at, "epoch", at), float(scheduler.scheduler.optimizer.param_groups[0]["lr"])))

        scheduler = callbacks.TorchScheduler(make)
        called: dict[str, list[Any]] = {"batch": [], "epoch": [], "eval": []}
        if resume is None:  # first in their lists, and yet called last
            called["epoch"].append(callbacks.do_checkpoint(prefix))
            called["batch"].append(callbacks.do_batch_checkpoint(prefix, 2))
        called[moment].append(scheduler)
        called["eval" if moment == "eval" else "epoch"].append(note)  # behind the scheduler
        fit(
            *(model, data, data),
            num_epoch=3,
            kvstore=store,
            reducer=reducer,
            optimizer_params=SGD,
            resume=resume,
            **{f"{moment}_end_callback": its for moment, its in called.items()},
        )
        return state(model), rates

    (_, rates), (_, others) = require_resumable(pair, work, prefix, [(2, 0)] if moment == "epoch" else [(1, 2)])
    assert rates == others
    assert len({rate for _, rate in rates}) > 1


def test_what_is_no_scheduler_for_fit() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(kv.UsageError, match=r"TorchScheduler takes a function .*, not StepLR"):
        callbacks.TorchScheduler(StepLR(optimizer, 3))  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="must return a scheduler, not a NoneType"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=callbacks.TorchScheduler(lambda _: None))
    plateau = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer))
    with pytest.raises(kv.UsageError, match="ReduceLROnPlateau needs a metric: pass it as eval_end_callback"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=plateau)
    other = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer), monitor="f1")
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor"):
        fit(network(), loader(8, 4), loader(8, 4), num_epoch=1, eval_end_callback=other)
