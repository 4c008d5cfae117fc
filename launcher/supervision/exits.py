"""How a process has ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNALS = frozenset(map(int, signal.Signals))


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9; `signal 42` for those that have no name."""
    return signal.Signals(signum).name if signum in _SIGNALS else f"signal {signum}"


@dataclass(frozen=True)
class Exit:
    """How a process ended: with a code, by a signal, or out of sight, which `text` tells about."""

    code: int = 0
    signum: int = 0
    text: str = ""

    @property
    def status(self) -> int:
        """As a shell would report it: 128 + N for death by signal N."""
        return 128 + self.signum if self.signum else self.code

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.signum:
            return f"was killed by {signal_name(self.signum)}"
        # A shell reports so that the program it ran was killed.
        hint = f" (128 + {signal_name(self.code - 128)})" if self.code - 128 in _SIGNALS else ""
        return f"exited with code {self.code}{hint}"
