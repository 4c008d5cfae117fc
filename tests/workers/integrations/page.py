"""The code of docs/with-other-tools.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def block(part: str) -> str:
    """The only block of code in which ``part`` stands."""
    text = (ROOT / "docs" / "with-other-tools.md").read_text(encoding="utf-8")
    (found,) = (code for code in re.findall(r"^```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if part in code)
    return str(found)
