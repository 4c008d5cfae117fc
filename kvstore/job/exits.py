"""How a process has ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNALS = frozenset(map(int, signal.Signals))


def signal_name(signum: int) -> str:
    """The name of a signal: `SIGKILL` for 9, `signal 42` if it has none."""
    return signal.Signals(signum).name if signum in _SIGNALS else f"signal {signum}"


@dataclass(frozen=True)
class Exit:
    """How a process ended: with a code, by a signal, or, on another host, as `text` says."""

    code: int = 0
    signum: int = 0
    text: str = ""

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """How a child ended, by what ``subprocess`` says: the code, or the negative number of the signal."""
        return cls(code=max(returncode, 0), signum=max(-returncode, 0))

    @property
    def status(self) -> int:
        """The exit status in a shell: 128 + N after signal N."""
        return 128 + self.signum if self.signum else self.code

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.signum:
            return f"was killed by {signal_name(self.signum)}"
        # A shell exits so if its program was killed.
        hint = f" (128 + {signal_name(self.code - 128)})" if self.code - 128 in _SIGNALS else ""
        return f"exited with code {self.code}{hint}"
