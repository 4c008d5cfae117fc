"""Settings in one word of a command line: a name and its options, such as `topk:ratio=0.05,momentum=0.9`."""

from __future__ import annotations

from typing import TypeAlias

Setting: TypeAlias = int | float | bool | str


def parse_setting(text: str) -> tuple[str, dict[str, Setting]]:
    """Return the name, and the options by name."""
    name, _, rest = text.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(",")) if rest else ()
    return name, {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Setting:
    """Return a number or a bool if `text` looks like one, otherwise `text`."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)
