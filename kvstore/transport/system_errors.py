"""Tells errors of the system from others of the same class.

``TimeoutError`` is an ``OSError``, and handlers of SIGALRM often raise it. Errors of the system have a number. One
without a number is somebody else's, and a transport must not swallow it.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType


def require_systems(error: BaseException) -> None:
    """Raise ``error`` again if it is an ``OSError`` that the system has not raised."""
    if isinstance(error, OSError) and error.errno is None:
        raise error


class ignored(suppress):  # noqa: N801, like the class it is made from
    """A block whose errors of the system are ignored. ``others`` are ignored whoever raises them."""

    def __init__(self, *others: type[Exception]) -> None:
        super().__init__(OSError, *others)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, OSError) and error.errno is None:
            return False
        return bool(super().__exit__(kind, error, traceback))
