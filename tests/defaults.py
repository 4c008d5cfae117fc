"""``pytest -p defaults --defaults NAME``: our code runs under a global default of torch's or numpy's that is not the usual one.

A program that calls ``torch.set_default_dtype(torch.float16)`` still has float32 arrays, and its tests would say so. So
a dtype or a device is the default in our code alone: while a function of torch runs whose nearest caller outside torch
is in one of our packages. The arrays of the tests, which name no dtype either, stay what they are.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("kvstore", "workers", "servers", "launcher"))
OTHERS = f"{Path(torch.__file__).parent}/"


LOCK = threading.RLock()
RUNNING = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
MAKING = {torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange, torch.rand, torch.randn, torch.linspace, torch.eye, torch.as_tensor, torch.normal}


def ours() -> bool:
    """Whether the nearest caller outside torch is our code."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return True
        if not name.startswith(OTHERS):
            return False
        frame = frame.f_back
    return False


class Within(TorchFunctionMode):
    """Functions of torch that our code calls run inside ``setting``."""

    def __init__(self, setting: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._setting = setting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RUNNING:  # user's code and ours run within it
            return func(*args, **(kwargs or {}))
        inside = ours()
        with LOCK if inside or func in MAKING else contextlib.nullcontext(), self._setting() if inside else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A default dtype, which is one for all threads: at worst another thread's function sees it, too."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def numpy_raises() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "float64": lambda: Within(lambda: default_dtype(torch.float64)),
    "bfloat16": lambda: Within(lambda: default_dtype(torch.bfloat16)),
    "float16": lambda: Within(lambda: default_dtype(torch.float16)),
    "device": lambda: Within(lambda: torch.device("meta")),
    "numpy": numpy_raises,
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "inference": lambda: Within(torch.inference_mode),
    "no_grad": lambda: Within(torch.no_grad),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--defaults", default="", help=f"one or several of {', '.join(DEFAULTS)}, with commas")


def pytest_configure(config: pytest.Config) -> None:
    """Threads begin with what the main one has: a mode and numpy's errors are each thread's own."""
    names = [name for name in config.getoption("--defaults").split(",") if name]
    run = threading.Thread.run
    config.stash[CHOSEN] = names

    def under(thread: threading.Thread) -> None:
        with under_all(names):
            run(thread)

    if names:
        threading.Thread.run = under  # type: ignore[method-assign]


CHOSEN = pytest.StashKey[list[str]]()


@contextlib.contextmanager
def under_all(names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(DEFAULTS[name]())
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with under_all(item.config.stash[CHOSEN]):
        return (yield)
