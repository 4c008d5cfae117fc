"""What ``--trace FILE[:ROUNDS]`` names: the file of a job's trace, and the rounds that it has."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.job.files import replacing
from kvstore.job.settings import TRACE
from kvstore.job.valid_values import RoundWindow

TRACED = "100"  # rounds of a trace, unless its user says which
EMPTY = '{"traceEvents":[]}\n'


class TraceTarget(NamedTuple):
    """An absolute path, and rounds."""

    file: Path
    rounds: RoundWindow

    @classmethod
    def parse(cls, text: str) -> TraceTarget:
        file, colon, rounds = text.rpartition(":")
        try:
            window = TRACE.values.parse(rounds)
        except ValueError:
            if colon and rounds and rounds.replace("-", "").isdigit():  # no file's name ends so by chance
                raise ConfigError(f"{rounds!r} is not valid; valid: {TRACE.values.valid}") from None
            colon = ""
        if not colon:
            file, window = text, TRACE.values.parse(TRACED)
        if not file or not window.last:
            raise ConfigError(f"{text!r} names no file, or no rounds; valid: FILE, FILE:100, FILE:500-600")
        if Path(file).is_dir():
            raise ConfigError(f"{file} is a directory; give a file in it")
        return cls(Path(file).absolute(), window)

    def prepare(self) -> None:
        """Make the file, which is an empty trace until there is something in it; ConfigError if that fails."""
        try:
            with replacing(self.file, durable=False) as draft:
                draft.write_text(EMPTY, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {self.file}: {error.strerror}") from None
