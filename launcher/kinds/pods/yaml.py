"""Writes YAML in block style. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*", re.ASCII)
_WORDS = frozenset(["false", "n", "no", "null", "off", "on", "true", "y", "yes"])


def dump(value: Any) -> str:
    """Return mappings, lists, strings, integers and booleans as YAML."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if value and isinstance(value, Mapping):
        for name, part in value.items():
            lines = list(_lines(part))
            if isinstance(part, (Mapping, list, tuple)) and part:
                yield f"{_scalar(name)}:"
                yield from lines if not isinstance(part, Mapping) else (f"  {line}" for line in lines)
            else:
                yield f"{_scalar(name)}: {lines[0]}"
    elif value and isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            for number, line in enumerate(_lines(part)):
                yield f"{'- ' if number == 0 else '  '}{line}"
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON is YAML, except for characters above 16 bits, which JSON escapes as two.
    return json.dumps(value, ensure_ascii=False)
