"""The layout says what it promises: tests mirror the packages, and a class name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "servers", "launcher", "workers")
LIST = "Modules without a test of their name:\n\n"


def modules() -> list[Path]:
    """All modules of the packages, from the root; neither ``__init__`` nor ``__main__``."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files if not path.name.startswith("__"))


def mirrored(module: Path) -> Path:
    """Where the tests of a module are."""
    return Path("tests") / module.with_name(f"test_{module.name}")


def excused() -> set[Path]:
    """The modules that CONTRIBUTING lists, with a reason for each."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.match(r"(?:[- ] .*\n)*", text.partition(LIST)[2])
    assert listed is not None
    names = re.findall(r"^- `([\w/]+\.py)` \w", listed[0], flags=re.MULTILINE)
    return {Path(name) for name in names if name.startswith(PACKAGES)}


def test_every_module_has_a_test_of_its_name_or_a_reason() -> None:
    missing = {module for module in modules() if not (ROOT / mirrored(module)).exists()}
    assert sorted(map(str, missing - excused())) == [], (
        "write their tests, or list them in CONTRIBUTING with the reason"
    )
    assert sorted(map(str, excused() - missing)) == [], (
        "they have tests, or are gone: drop them from the list in CONTRIBUTING"
    )


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(module))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
