"""What README, CONTRIBUTING and docs/ point to is there: links, headings, files, and names in files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
TOP = ("kvstore", "servers", "launcher", "workers", "tests", "examples", "benchmarks", "docs")
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # of a change log, files may have gone since
IDS = {"ids": lambda page: str(page.relative_to(ROOT))}

_LINK = re.compile(r"\]\(([^)\s]*)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_NAMED = re.compile(
    r"`([A-Za-z_][\w.]*)`(?:,| in) `((?:kvstore|servers|launcher|workers)/[\w/]*(?:\.py)?)`"
)  # a name, and the file or folder that has it


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a page may end in: its headings, and the names whose docstrings it gets."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    names = re.findall(r"^::: ([\w.]+)$", prose(page), flags=re.MULTILINE)
    return {*names} | {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(page: Path) -> set[str]:
    """The files and folders of the project that a page names, from the root."""
    words = (word for span in _CODE.findall(prose(page)) for word in span.split())
    return {word for word in words if re.fullmatch(rf"({'|'.join(TOP)})/[\w./-]*", word)}


def names(path: Path) -> Iterator[str]:
    """The classes, functions, methods and attributes that a file, or the files of a folder, define."""
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            yield from _defined(node)
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    for name in _defined(inner):
                        yield from (name, f"{node.name}.{name}")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", PAGES, **IDS)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        leads_to = page.parent / file if file else page
        if not leads_to.exists() or (anchor and anchor not in anchors(leads_to)):
            broken.append(target)
    assert broken == []


def test_a_page_has_one_title_which_is_its_first_line() -> None:
    titles = {page.relative_to(ROOT): re.findall(r"^# .*", prose(page), flags=re.MULTILINE) for page in PAGES}
    wrong = {page: found for page, found in titles.items() if len(found) != 1}
    assert wrong == {}, "a site's table of contents begins below the title"
    assert [page for page in PAGES if not page.read_text(encoding="utf-8").startswith("# ")] == []


@pytest.mark.parametrize("page", CURRENT, **IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [path for path in sorted(paths(page)) if not (ROOT / path).exists() and not list(ROOT.glob(path))]
    assert missing == []


@pytest.mark.parametrize("page", CURRENT, **IDS)
def test_names_are_where_the_page_says(page: Path) -> None:
    named = _NAMED.findall(prose(page))
    assert [(name, path) for name, path in named if name not in names(ROOT / path)] == []


def test_pages_are_short_enough_to_be_read() -> None:
    """The changelog, the reference and the tables of settings grow with the project; all else is cut when it grows."""
    sizes = {page.relative_to(ROOT): page.stat().st_size for page in CURRENT if "reference" not in page.parts}
    assert {str(page): size for page, size in sizes.items() if size > 25_000} == {}, "split or cut this page"
    assert sum(size for page, size in sizes.items() if page.parts[0] == "docs") <= 256_000


def test_a_first_week_needs_as_many_words_as_the_start_page_says() -> None:
    start = ROOT / "docs" / "index.md"
    section = start.read_text(encoding="utf-8").partition("\n## The first week\n")[2].partition("\n## ")[0]
    pages = [start, *(start.parent / target for target in re.findall(r"\| .*?\]\(([\w-]+\.md)\)", section))]
    assert len(pages) > 4
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert "15,000 words in all" in section
    assert words <= 15_000, f"{words} words: cut {', '.join(page.name for page in pages)}"


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[x](gone.md) [y](#a-b)\n```\n[z](w)\n```\n`Store.push`, `kvstore/client/` and `kvstore/no.py`\n"
    )
    assert _LINK.findall(prose(page)) == ["gone.md", "#a-b"]
    assert anchors(page) == {"a-b"}
    assert paths(page) == {"kvstore/client/", "kvstore/no.py"}
    assert _NAMED.findall(prose(page)) == [("Store.push", "kvstore/client/")]
    assert "Store.push" not in names(ROOT / "kvstore" / "client")
    assert "DistStore.pushpull" in names(ROOT / "kvstore" / "client")
