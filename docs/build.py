"""Builds the site from the pages of the project: ``python docs/build.py``; ``make docs`` runs it.

The pages are plain Markdown, for readers on a code host. ``collect`` puts those of docs/, the examples' page, the
change log and CONTRIBUTING into one folder, and rewrites the links between them. Zensical makes the site, with the API
reference from the docstrings. ``mistakes`` then reads what was made. Every warning is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"  # zensical.toml names both
SITE = ROOT / "build" / "site"

# Where pages outside of docs/ are in the site. Of the README the site has the landing page.
ELSEWHERE = {
    Path("README.md"): Path("index.md"),
    Path("examples/README.md"): Path("examples.md"),
    Path("CHANGELOG.md"): Path("changelog.md"),
    Path("CONTRIBUTING.md"): Path("contributing.md"),
}

PICTURES = (".png", ".svg")

_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_COLOR = re.compile(r"\x1b\[[\d;]*m")


def placed(source: Path) -> Path | None:
    """The site's page for a file, both from their roots; None if it has none."""
    if source in ELSEWHERE:
        return ELSEWHERE[source]
    if source.suffix in (".md", *PICTURES) and source.parts[0] == "docs":
        return source.relative_to("docs")
    return source.with_suffix(".md") if source.suffix == ".py" and source.parts[0] == "examples" else None


def collect(root: Path, folder: Path) -> None:
    """Write all pages into ``folder``, with the examples that they link to, and the other files of docs/."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = [path.relative_to(root) for path in (root / "docs").rglob("*.md")]
    for source in [*pages, *(path for path in ELSEWHERE if path.name != "README.md" or path.parent.name)]:
        text, programs = relinked(root, source)
        _write(folder, source, text)
        for program in programs:
            _write(folder, program, f"# {program}\n\n````python\n{(root / program).read_text(encoding='utf-8')}````\n")
    for picture in (path for path in (root / "docs").rglob("*") if path.suffix in PICTURES):
        place = folder / picture.relative_to(root / "docs")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, place)
    shutil.copy(root / "docs" / "site.css", folder)


def relinked(root: Path, source: Path) -> tuple[str, set[Path]]:
    """A page with its links as they are in the site, and the programs among their targets.

    Where a link leads to a file without a page, its text stays. A link whose text is the name of a page gets its title.
    """
    programs = set()
    here = placed(source) or source

    def relink(match: re.Match[str]) -> str:
        words, target = match.groups()
        file, hash_, anchor = target.partition("#")
        if "://" in target or not file:
            return match[0]
        to = Path(os.path.normpath(source.parent / file))
        page = placed(to)
        if page is None:
            return words
        if to.suffix == ".py":
            programs.add(to)
        elif words.endswith(".md"):
            words = (root / to).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{words}]({Path(os.path.relpath(page, here.parent)).as_posix()}{hash_}{anchor})"

    parts = _BLOCK.split((root / source).read_text(encoding="utf-8"))
    parts[::2] = [_LINK.sub(relink, part) for part in parts[::2]]
    return "".join(parts), programs


def _write(folder: Path, source: Path, text: str) -> None:
    page = folder / (placed(source) or source)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


class Html(HTMLParser):
    """What a page of the site can be linked to by, links to, and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in one element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])


def mistakes(site: Path) -> Iterator[str]:
    """Links that lead nowhere, what would be loaded from other hosts, and modules in the reference."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    pages = {path: Html(text) for path, text in texts.items()}
    for path, html in sorted(pages.items()):
        if path.name == "404.html":  # it is shown under any address, so its links are absolute
            continue
        name = path.relative_to(site)
        if "doc-module" in texts[path]:
            yield f"{name} describes a module, which has the name of what was meant"
        for url in html.loaded:
            if urlsplit(url).netloc:
                yield f"{name} loads {url}"
            elif not url.startswith("data:") and not (path.parent / urlsplit(url).path).exists():
                yield f"{name} loads {url}, which is not there"
        for url in sorted(set(html.links)):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name} links to {url}, which is not there"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {url}, which has no such anchor"
    for style in site.rglob("*.css"):
        for url in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)} loads {url}"


def warnings(output: str) -> list[str]:
    """The lines of Zensical's output that say what is wrong, and where."""
    lines = _COLOR.sub("", output).splitlines()
    return [line for line in lines if re.match(r"(griffe|mkdocstrings|autorefs|warning|error)\b", line.strip(), re.I)]


def main() -> int:
    """Build the site; return the exit code."""
    if find_spec("zensical") is None:
        print("The docs need zensical, which pip install -e '.[docs]' brings with Python 3.11 or later.")
        return 1
    collect(ROOT, PAGES)
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(zensical, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    wrong: Iterable[str] = warnings(done.stdout)
    if done.returncode or wrong:
        print(_COLOR.sub("", done.stdout))
    else:
        wrong = list(mistakes(SITE))
    for line in wrong:
        print(line)
    if done.returncode or wrong:
        print("The site has not been built: see above.")
        return 1
    print(f"The site is in {SITE.relative_to(ROOT)}: open {(SITE / 'index.html').relative_to(ROOT)} in a browser.")
    print(f"Its search needs a server: python -m http.server -d {SITE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
