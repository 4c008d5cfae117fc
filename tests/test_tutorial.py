"""docs/tutorial.md, run from its beginning to its end: the code of each block, and what it says is printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from threaded import ThreadedJob

import kvstore
import workers
from kvstore.client import DistStore

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """Some code, and the output that stands below it."""

    line: int
    language: str
    code: str
    output: str

    @property
    def file(self) -> str:
        """The file that the code is, by its first line; empty if it is to be run."""
        match = _FILE.match(self.code)
        return match[1] if match and self.language == "python" else ""


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        language, content = match.groups()
        line = text[: match.start()].count("\n") + 1
        if language == "text":
            assert found, f"line {line}: output of nothing"
            assert not found[-1].output, f"line {line}: a second output"
            found[-1] = Block(found[-1].line, found[-1].language, found[-1].code, content)
        else:
            found.append(Block(line, language, content, ""))
    return found


BLOCKS = blocks(TUTORIAL.read_text(encoding="utf-8"))
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
FILES = {block.file: block for block in BLOCKS if block.file}


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Path]:
    """A directory in which the files of the tutorial are, and a group that is over at the end."""
    for name, block in FILES.items():
        (tmp_path / name).write_text(block.code)
    yield tmp_path
    workers.shutdown()


def test_blocks_are_found_with_their_output() -> None:
    text = "a\n```python\nx = 1\n```\n\n```text\nout\n```\n```sh\n# f.py\n```\n"
    assert blocks(text) == [Block(2, "python", "x = 1\n", "out\n"), Block(9, "sh", "# f.py\n", "")]
    assert [block.file for block in blocks("```python\n# f.py\nx\n```\n```sh\n# f.py\n```\n")] == ["f.py", ""]


def test_the_python_blocks_print_what_they_say(notebook: Path) -> None:
    names: dict[str, object] = {"__name__": "tutorial"}
    for block in BLOCKS:
        if block.language == "python" and not block.file:
            said = io.StringIO()
            code = compile("\n" * block.line + block.code, str(TUTORIAL), "exec")
            with contextlib.redirect_stdout(said):
                exec(code, names)
            assert said.getvalue() == block.output, f"the block in line {block.line}"


@pytest.mark.parametrize("name", ["sums.py", "train.py", "compressed.py"])
def test_the_scripts_print_what_the_tutorial_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of a job in threads: processes run one script in CI, and all of them before a release."""
    said: list[str] = []
    one_at_a_time = threading.Lock()  # who draws numbers, until there is a store

    def run(store: DistStore) -> None:
        def create(kind: str) -> DistStore:
            assert kind == store.type
            one_at_a_time.release()
            return store

        stores[threading.get_ident()] = create
        names = {"__name__": "__main__", "print": lambda *words: said.append(f"[worker {store.rank}] " + text(*words))}
        one_at_a_time.acquire()
        exec(compile("\n" * FILES[name].line + FILES[name].code, str(TUTORIAL), "exec"), names)

    def text(*words: object) -> str:
        return " ".join(map(str, words))

    stores: dict[int, Callable[[str], DistStore]] = {}
    monkeypatch.setattr(kvstore, "create", lambda kind: stores[threading.get_ident()](kind))
    with ThreadedJob(workers=2, servers=2) as job:
        job.run(run)
    (command,) = (block for block in COMMANDS if name in block.code)
    assert sorted(said) == command.output.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, id=b.code.split("#")[0].strip(), marks=[] if "fails.py" in b.code else pytest.mark.release)
        for b in COMMANDS
    ],
)
def test_the_commands_print_what_they_say(block: Block, notebook: Path) -> None:
    code = 1 if "exits with 1" in block.code else 0
    programs = notebook / "bin"
    programs.mkdir()
    (programs / "launch.py").write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/launcher/launch.py "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    shell = shutil.which("sh") or "/bin/sh"
    done = subprocess.run([shell, "-c", block.code], cwd=notebook, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(block.output.splitlines()), done.stderr


def test_every_file_is_run_and_every_link_leads_somewhere() -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    commands = " ".join(block.code for block in COMMANDS)
    assert all(name in commands for name in FILES)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (TUTORIAL.parent / target).exists(), target
    headings = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
