"""Texts as they were when somebody last read them, in files of ``golden/``. ``UPDATE_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent / "golden"


def same(name: str, text: str) -> None:
    """Fail unless ``text`` is that of the file."""
    file = HERE / name
    if sys.version_info < (3, 11):  # which has no -P
        text = text.replace(" -m servers", " -P -m servers")
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
