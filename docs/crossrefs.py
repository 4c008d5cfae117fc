"""Links between docstrings, for the site: an extension of griffe, which zensical.toml names.

A docstring writes ``Trainer.step`` or ``UsageError``, as a reader of the code or of ``help()`` would want it. In the
site these become links to where the reference has them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

REFERENCE = Path(__file__).resolve().parent / "reference"
_NAME = re.compile(r"``(?:workers\.|kvstore\.|launcher\.)?([A-Z]\w*)(\.\w+)?``")  # a class, or something in it
_PAGE = re.compile(r"``docs/([\w-]+\.md)``")


@cache
def places() -> dict[str, str]:
    """The full names of the classes in the reference, by their own."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return {full.rpartition(".")[2]: full for full in re.findall(r"^::: ([\w.]+\.[A-Z]\w*)$", text, re.MULTILINE)}


def linked(text: str) -> str:
    """A docstring in which classes of the reference, their methods, and pages of docs/ are links."""

    def link(match: re.Match[str]) -> str:
        full = places().get(match[1])
        return f"[`{match[0].strip('`')}`][{full}{match[2] or ''}]" if full else match[0]

    return _PAGE.sub(lambda match: f"[{_title(match[1])}](../{match[1]})", _NAME.sub(link, text))


def _title(page: str) -> str:
    return (REFERENCE.parent / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


class Crossrefs(griffe.Extension):
    """Links docstrings, and lets every module know the classes that its ``Raises`` sections name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Link one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = linked(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add the names that the module lacks, as if it imported them."""
        for name, full in places().items():
            if name not in mod.members and not full.startswith(f"{mod.path}."):
                mod.set_member(name, griffe.Alias(name, full))
