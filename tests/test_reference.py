"""The API reference has every public name, and every public name has a docstring that renders."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.observing.status_command import main as status
from launcher.cli import parse

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
MODULES = ("kvstore", "launcher", "workers", "workers.callbacks", "workers.metrics", "workers.schedules")
OURS = ("kvstore", "launcher", "servers", "workers")


def names() -> Iterator[tuple[str, Any]]:
    """The public names, and what they are; a module in one of these has a page of its own."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            if not inspect.ismodule(thing := getattr(module, name)):
                yield f"{module.__name__}.{name}", thing


NAMES = dict(names())


def documented() -> Iterator[tuple[str, str]]:
    """A docstring for each public class, function, method and property."""
    for name, thing in NAMES.items():
        if isinstance(thing, str):  # workers.Average and workers.Sum
            continue
        yield name, inspect.getdoc(thing) or ""
        for inner, member in inspect.getmembers(thing) if inspect.isclass(thing) else ():
            owner = next((base for base in thing.__mro__ if inner in base.__dict__), thing)
            function = inspect.isroutine(member) or isinstance(member, property)
            if function and not inner.startswith("_") and owner.__module__.partition(".")[0] in OURS:
                yield f"{name}.{inner}", inspect.getdoc(member) or ""


DOCUMENTED = dict(documented())


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    assert Counter(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)) == Counter(list(NAMES))


def test_dir_lists_the_public_names() -> None:
    for module in map(importlib.import_module, MODULES):
        assert {name for name in dir(module) if not name.startswith("_")} == set(module.__all__), module.__name__


def test_every_page_of_the_reference_is_listed_in_its_index_and_in_the_site() -> None:
    pages = {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", (PAGES / "index.md").read_text(encoding="utf-8"))) == pages
    site = (PAGES.parents[1] / "zensical.toml").read_text(encoding="utf-8")
    assert set(re.findall(r'"([\w/-]+\.md)"', site)) == {
        *(str(page.relative_to(PAGES.parent)) for page in PAGES.parent.rglob("*.md")),
        *("examples.md", "changelog.md", "contributing.md"),
    }


def test_every_public_method_has_a_docstring_whose_first_line_says_what_it_does() -> None:
    first = {name: text.partition("\n")[0] for name, text in DOCUMENTED.items()}
    assert {name: line for name, line in first.items() if not re.match(r"[A-Z`].*[.:]$", line)} == {}


def test_every_argument_is_described() -> None:
    """In its own line below ``Args``, or by name in the text; an override may refer to what it overrides."""
    missing = {}
    for name, (function, text) in dict(_called()).items():
        listed = "".join(text.partition(f"{section}:\n")[2].partition("\n\n")[0] for section in ("Args", "Attributes"))
        if unknown := [
            parameter
            for parameter in inspect.signature(function).parameters
            if parameter not in ("self", "args", "kwargs", "other")
            and not re.search(rf"^ *{parameter}: |`{parameter}(?:`|=)", f"{listed}\n{text}", flags=re.MULTILINE)
        ]:
            missing[name] = unknown
    assert missing == {}


def _called() -> Iterator[tuple[str, tuple[Any, str]]]:
    for name, text in DOCUMENTED.items():
        thing = NAMES.get(name) or getattr(NAMES[name.rpartition(".")[0]], name.rpartition(".")[2])
        if inspect.isclass(thing):
            thing = None if issubclass(thing, BaseException) else thing.__init__
        if inspect.isfunction(thing) and not text.startswith("See ``"):
            yield name, (thing, text)


def test_docstrings_render_and_name_no_files_of_the_source() -> None:
    foreign = re.compile(r"::$|^:\w+|^\w+\n-{3,}$|\b(?:kvstore|workers|servers|launcher)/[\w/]*\.py", re.MULTILINE)
    assert {name: found[0] for name, text in DOCUMENTED.items() if (found := foreign.search(text))} == {}


def test_signatures_are_readable() -> None:
    functions = {name: thing for name, thing in NAMES.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    shown = {name: str(inspect.signature(thing)) for name, thing in functions.items() if _has_signature(thing)}
    assert {name: text for name, text in shown.items() if " object at 0x" in text or "<function" in text} == {}


def _has_signature(thing: Any) -> bool:
    return not (inspect.isclass(thing) and issubclass(thing, BaseException))


def test_the_page_of_launch_py_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    printed = " ".join(capsys.readouterr().out.split())
    page = (PAGES / "commands.md").read_text(encoding="utf-8").partition("\n## kvstore-status\n")[0]
    rows = re.findall(r"^\| (`-.*) \| (.*) \|$", page, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(option for option, _ in rows))) == set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]*", printed.partition("options:")[2].partition("examples:")[0])
    )
    assert [meaning for _, meaning in rows if meaning.replace("`", "") not in printed] == []


def test_the_page_of_kvstore_status_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status(["--help"])
    printed = capsys.readouterr().out.partition("options:")[2]
    page = (PAGES / "commands.md").read_text(encoding="utf-8").partition("\n## kvstore-status\n")[2]
    rows = "\n".join(line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `-"))
    pattern = r"(?<![\w-])--[a-z][a-z-]*"
    assert set(re.findall(pattern, rows)) == set(re.findall(pattern, printed)) - {"--help"}
