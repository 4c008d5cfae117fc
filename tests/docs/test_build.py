"""docs/build.py: how pages get into the site, and what is wrong with a site."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import build


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a page for each kind of link."""
    pages = {
        "docs/guide.md": "# The guide\n[a](reference/names.md#x) [reference/names.md](reference/names.md) [b](#here)",
        "docs/reference/names.md": "# Names\n[up](../guide.md) [start](../../README.md) [out](https://example.org)",
        "examples/README.md": "# Examples\n[code](train.py) [guide](../docs/guide.md)\n```\n[kept](train.py)\n```\n",
        "examples/train.py": "print(1)\n",
        "CHANGELOG.md": "# Changelog\n[license](LICENSE)",
        "CONTRIBUTING.md": "# Contributing\n[`guide`](docs/guide.md#the-guide)",
        "docs/site.css": "",
        "docs/images/page.png": "the page",
        "docs/pictures.md": "# Pictures\n![the page](images/page.png)",
    }
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_links_lead_to_where_pages_are_in_the_site(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    build.collect(project, folder)
    assert {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")} == {
        "guide.md": "# The guide\n[a](reference/names.md#x) [Names](reference/names.md) [b](#here)",
        "reference/names.md": "# Names\n[up](../guide.md) [start](../index.md) [out](https://example.org)",
        "pictures.md": "# Pictures\n![the page](images/page.png)",
        "examples.md": "# Examples\n[code](examples/train.md) [guide](guide.md)\n```\n[kept](train.py)\n```\n",
        "examples/train.md": "# examples/train.py\n\n````python\nprint(1)\n````\n",
        "changelog.md": "# Changelog\nlicense",
        "contributing.md": "# Contributing\n[`guide`](guide.md#the-guide)",
    }
    assert (folder / "images" / "page.png").read_text() == "the page"


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="x y"></h1><a href="../b.html#no">')
    (tmp_path / "b.html").write_text(
        '<div class="doc doc-module"></div>'
        '<a href="a#x%20y"><a href="gone.html"><a href="https://example.org"><a href="#"><img src="data:,">'
        '<script src="https://example.org/s.js"></script><link rel="stylesheet" href="gone.css">'
    )
    (tmp_path / "404.html").write_text('<a href="/nowhere.html">')
    (tmp_path / "c.css").write_text("@import url(//example.org/f.css); b { background: url(data:,) }")
    assert list(build.mistakes(tmp_path)) == [
        "a/index.html links to ../b.html#no, which has no such anchor",
        "b.html describes a module, which has the name of what was meant",
        "b.html loads https://example.org/s.js",
        "b.html loads gone.css, which is not there",
        "b.html links to gone.html, which is not there",
        "c.css loads //example.org/f.css",
    ]


def test_warnings_are_found_in_colored_output() -> None:
    output = "Build started\n\x1b[33mWarning:\x1b[0m page does not exist\ngriffe: a.py:1: no such parameter\nDone\n"
    assert build.warnings(output) == ["Warning: page does not exist", "griffe: a.py:1: no such parameter"]
