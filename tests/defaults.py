"""``pytest --defaults NAME``: tests run while torch or numpy has another global default than the usual one.

A program that calls ``torch.set_default_dtype(torch.float16)`` may have float32 arrays all the same, and so have the
tests, which name no dtype. So a dtype or a device is the default for our code alone: while a function of torch runs
whose nearest caller outside torch is in one of our packages.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import zlib
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
# What torch's own optimizers and loaders make follows the defaults wherever they are used; it is no choice of ours.
TORCHS = (f"{OTHERS}optim/", f"{OTHERS}utils/data/")
RUN = threading.Thread.run
LOCK = threading.RLock()  # the default dtype is one for all threads, and even a quotient of integers has it
RUNNING = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}  # others' code within


def ours() -> bool:
    """Whether the nearest caller outside torch is our code."""
    frame = sys._getframe(2)
    while frame is not None:
        found = _whose(frame.f_code.co_filename)
        if found is not None:
            return found
        frame = frame.f_back
    return False


@functools.cache  # each function of torch asks
def _whose(file: str) -> bool | None:
    """True for ours, False for another's, and None for torch's own, whose caller decides."""
    if file.startswith(OURS):
        return True
    return None if file.startswith(OTHERS) and not file.startswith(TORCHS) else False


class Within(TorchFunctionMode):
    """Functions of torch that our code calls run inside ``setting``."""

    def __init__(self, setting: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._setting = setting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RUNNING:
            return func(*args, **kwargs)
        with LOCK, self._setting() if ours() else contextlib.nullcontext():
            return func(*args, **kwargs)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
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
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


# A default dtype is one for all threads of a process, and jobs in threads make tensors of the tests' own meanwhile. So
# it is set where one thread alone runs; test_constructors.py looks at all lines.
SETS = (("device", "numpy"), ("deterministic", "anomaly"))
OF_STORES = (*SETS, ("inference",), ("no_grad",))  # training needs gradients
OF_ONE_THREAD = (("float16", "device"), ("float64", "numpy"), ("bfloat16", "deterministic"), ("inference",))
SUITES = ("tests/kvstore/store/", "tests/workers/")  # the tests of what programs call
SHARE = 3  # of these tests, one in so many runs so with ``each``: CI has little time, and each suite has many like it


def chosen(option: str, nodeid: str, long: bool) -> list[str]:
    """Return the defaults of a test: those that the option names, or with ``each`` those that its name gives it."""
    if option != "each":
        return [name for name in option.split(",") if name]
    if long or not nodeid.startswith(SUITES) or zlib.crc32(nodeid.encode()) % SHARE:
        return []
    sets = OF_STORES if "/kvstore/store/" in nodeid else SETS
    if sets is OF_STORES and "dist" not in nodeid and re.search(r"[\[-](local|device)\b", nodeid):
        sets = OF_ONE_THREAD
    return list(sets[zlib.crc32(nodeid.encode()) // SHARE % len(sets)])


@contextlib.contextmanager
def under(names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(DEFAULTS[name]())
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--defaults",
        default="",
        help=f"what tests run under: several of {', '.join(DEFAULTS)}, with commas; or each: of the tests of stores "
        f"and of training one in {SHARE} under a set of them",
    )


def begin_threads(names: list[str]) -> None:
    """Let threads that begin from now on have these defaults: a mode and numpy's errors are each thread's own."""

    def run(thread: threading.Thread) -> None:
        with under(names):
            RUN(thread)

    threading.Thread.run = run if names else RUN  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Let no thread see the default dtype while another has set it. Torch's optimizers read it for their counts."""
    option = config.getoption("--defaults")
    read = torch.get_default_dtype

    def read_alone() -> torch.dtype:
        with LOCK:
            return read()

    if option:
        torch.get_default_dtype = read_alone
    if option != "each":  # the servers of a job that a fixture makes wait for the lock only under the mode
        begin_threads(chosen(option, "", long=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test under its defaults; with ``each`` not its fixtures, which other tests may have, too."""
    option = item.config.getoption("--defaults")
    names = chosen(option, item.nodeid, item.get_closest_marker("long") is not None)
    if not names:
        return (yield)
    item.add_report_section("call", "defaults", f"It ran with --defaults {','.join(names)}.")
    begin_threads(names)
    try:
        with under(names):
            return (yield)
    finally:
        if option == "each":
            begin_threads([])
