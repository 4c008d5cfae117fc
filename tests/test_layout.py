"""What the layout promises: a class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "servers", "launcher", "workers")


def modules() -> list[Path]:
    """All modules of the packages, from the root; neither ``__init__`` nor ``__main__``."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files if not path.name.startswith("__"))


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(module))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
