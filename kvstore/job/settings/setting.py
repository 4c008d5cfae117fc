"""One environment variable: its name, type, range, default and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.errors import ConfigError
from kvstore.job.valid_values import ValidValues

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable.

    Attributes:
        name: the variable.
        values: its type and range.
        default: its value where the variable is not set, or empty.
        meaning: what it is for, as the documentation says it.
        shown: the default in words, where ``default`` does not say it.
        aliases: other names that mean the same; ``name`` goes before them.
    """

    name: str
    values: ValidValues[T]
    default: T
    meaning: str
    shown: str = ""
    aliases: tuple[str, ...] = ()

    def read(self, env: Mapping[str, str], default: T | None = None) -> T:
        """Return the value in ``env``.

        Args:
            env: environment variables.
            default: what to return instead of the setting's own default.

        Raises:
            ConfigError: the variable has a value that is not valid; the message says which would be.
        """
        for name in (self.name, *self.aliases):
            text = env.get(name, "").strip()
            if text:
                try:
                    return self.values.parse(text)
                except ValueError:
                    raise ConfigError(f"{name}={text!r} is not valid; valid: {self.values.valid}") from None
        return self.default if default is None else default

    @property
    def row(self) -> str:
        """Its row of a table in Markdown: names, values, default, meaning."""
        names = " or ".join(f"`{name}`" for name in (self.name, *self.aliases))
        return f"| {names} | {self.values.valid} | {self.shown_default} | {self.meaning} |"

    @property
    def shown_default(self) -> str:
        """The default as the documentation shows it."""
        if self.shown or self.default == "":
            return self.shown or "none"
        if isinstance(self.default, bool):
            return "1" if self.default else "0"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
