"""The layout is as it promises: tests use public names, and a class name means one thing in its package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "servers", "launcher", "workers")
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Where one may stand that is another's: it takes seconds to walk through all modules.
SUSPECT = re.compile(
    r"""(?<!self)(?<!cls)(?<!super\(\))\._[A-Za-z]|["'][\w.]*\b_[A-Za-z]|import [^\n"']*\b_[A-Za-z]|^ +_\w+,$""", re.M
)
REPLACING = {"setattr", "delattr", "getattr", "object"}  # calls that take a name as a text; the last is mock's
# Names of others that begin with an underscore and are documented all the same, or have no other door.
ALLOWED = {
    "_replace": "of namedtuples",
    "_getframe": "of sys: who calls a function of torch",
    "_current_frames": "of sys: a test looks at what is so while it is called",
    "_exit": "of os",
    "_inheriting": "of multiprocessing: whether a process runs its parent's script, and not its own function yet",
    "_run_exitfuncs": "of atexit, which has no public way to run the hooks",
    "_tmp_path_factory": "of pytest: what makes the directory that all tests have theirs in",
    "_set_updater": "of MXNet's KVStore",
    "_barrier": "of MXNet's KVStore",
    "_send_command_to_servers": "of MXNet's KVStore",
    "_version": "of torch's tensors: its counter of writes in place, which torch's own documents name",
    "_post_accumulate_grad_hooks": "of torch's tensors, which do not tell otherwise how many hooks they have",
    "_foreach_mul_": "of torch: a test takes it away, as a version without it would",
    "_execution_engine": "of torch's Variable: a test takes it away, as a version without it would",
    "_active_ddp_module": "of torch's DDP: which module runs in this process, whatever thread asks",
    "_C": "of torch: see the next",
    "_dynamo": "of torch, and of torch._C: what torch.compile works with",
    "_enable": "of torch's compiled autograd, which has no public switch for one backward pass",
    "_torchdynamo_disable": "of torch: what torch.compiler.disable sets, and Dynamo reads",
    "_current_graph_task_id": "of torch._C: a test takes it away, as a version without it would",
}


def modules() -> list[Path]:
    """All modules of the packages, from the root; neither ``__init__`` nor ``__main__``."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in files if not path.name.startswith("__"))


def test_a_class_name_exists_once_in_its_package() -> None:
    places = defaultdict(list)
    for module in modules():
        for name in re.findall(r"^(?:    )?class (\w+)", (ROOT / module).read_text(encoding="utf-8"), re.MULTILINE):
            places[module.parts[0], name].append(str(module))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_index_of_a_package_names_only_what_is_there() -> None:
    missing = []
    for package in PACKAGES:
        for index in sorted((ROOT / package).rglob("__init__.py")):
            said = ast.get_docstring(ast.parse(index.read_text(encoding="utf-8"))) or ""
            for name in re.findall(r"^([a-z_]+)  +\S", said, re.MULTILINE):
                if not (index.parent / f"{name}.py").exists() and not (index.parent / name).is_dir():
                    missing.append(f"{index.relative_to(ROOT)}: {name}")
    assert missing == []


def own(node: ast.expr) -> bool:
    """Whether attributes of a node are the class's own: of ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def reached(node: ast.AST) -> set[str]:
    """Private names of others that a node reaches for: as an attribute, as a text, or by an import."""
    names: set[str] = set()
    if isinstance(node, ast.Attribute):
        if node.attr[0] == "_" and not own(node.value):
            names.add(node.attr)
    elif isinstance(node, ast.ImportFrom):
        names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if called in REPLACING:
            names.update(part for text in texts for part in text.split("."))
    return {name for name in names if PRIVATE.fullmatch(name)} - ALLOWED.keys()


def private(text: str) -> list[str]:
    """Private names of others that a module reaches for, with their lines."""
    if not SUSPECT.search(text):
        return []
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute | ast.ImportFrom | ast.Call))
    return [f"{node.lineno} {name}" for node in nodes for name in reached(node)]


def test_tests_and_benchmarks_use_public_names() -> None:
    files = (path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py")))
    found = {str(path.relative_to(ROOT)): private(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in found.items() if names} == {}, (
        "look from outside, or give the class a door that its readers would want; ALLOWED is for names of others"
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("store._session.client", ["1 _session"]),
        ("x = 1\nself.store._client.y", ["2 _client"]),
        ("monkeypatch.setattr(links, '_shared', None)", ["1 _shared"]),
        ("monkeypatch.setattr('kvstore.links._shared', None)", ["1 _shared"]),
        ("mock.patch.object(Links, '_read')", ["1 _read"]),
        ("getattr(store, '_rule')", ["1 _rule"]),
        ("from kvstore.member.links import Links, _Ends", ["1 _Ends"]),
        ("self._own; cls._own; super()._own; x.__name__; sender._replace(seq=1); f('_text')", []),
    ],
)
def test_what_a_private_name_is(text: str, names: list[str]) -> None:
    assert private(text) == names
