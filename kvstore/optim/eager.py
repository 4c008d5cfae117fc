"""torch's optimizers without what they do for ``torch.compile`` alone.

To make an optimizer of torch, or a step of it, imports torch's compiler: a second of processor time and 75 MB, in each
server. The methods underneath compute the same, and servers compile nothing.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound="type[torch.optim.Optimizer]")


def eager(cls: T) -> T:
    """Return a subclass of ``cls`` that makes the same steps, and neither imports nor tells torch's compiler.

    Args:
        cls: of ``torch.optim``. What decorates its ``step`` is left out: there torch turns gradients off, and marks
            the step for compilers and profilers.
    """
    optimizer: Any = cls
    subclass: T = _eager(optimizer)
    return subclass


@functools.cache
def _eager(optimizer: Any) -> Any:
    members = {
        "__doc__": optimizer.__doc__,
        "__module__": optimizer.__module__,
        "add_param_group": inspect.unwrap(optimizer.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(optimizer.step)),
    }
    return type(optimizer.__name__, (optimizer,), members)
