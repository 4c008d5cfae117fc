"""Texts as they were when somebody last read them, in files of ``golden/``. ``UPDATE_GOLDEN=1`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.job.our_module import ROOT

HERE = Path(__file__).parent / "golden"


def same(name: str, text: str) -> None:
    """Fail unless ``text`` is that of the file."""
    file = HERE / name
    text = text.replace(f"{ROOT}/", "(the clone)/")
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
