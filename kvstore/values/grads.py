"""Work that autograd does not see, and work of one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def without_grad(action: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what ``action`` returns, which nothing records for autograd.

    A signal's handler may raise at the end of ``torch.no_grad()``. This restores the caller's mode even then.
    """
    recording = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        result = action(*args, **options)
        torch.set_grad_enabled(recording)
    except BaseException:
        torch.set_grad_enabled(recording)
        raise
    return result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch use this thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
