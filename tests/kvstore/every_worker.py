"""A test of one worker's store, which every worker of a job calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from threaded import ThreadedJob


def every_worker_of(job: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn a test of a ``store`` into one of ``job``: a fixture that is a job, or a function that runs one."""

    def decorated(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def runs(**given: Any) -> None:
            which = given.pop(job)
            run = which.run if isinstance(which, ThreadedJob) else which
            run(lambda store: test(store=store, **given))

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "store"]
        fixture = inspect.Parameter(job, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        runs.__signature__ = signature.replace(parameters=[fixture, *others])  # type: ignore[attr-defined]
        return runs

    return decorated
