"""Work that autograd does not see."""

from __future__ import annotations

from collections.abc import Callable
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
