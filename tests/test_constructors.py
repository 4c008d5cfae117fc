"""What makes a tensor names its dtype and its device: a program may have set other defaults for both.

``tests/defaults.py`` runs tests under such defaults. It sees only what they run, so this looks at every line.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "servers", "launcher", "workers")
BOTH = frozenset({"dtype", "device"})
NEEDED = {
    **dict.fromkeys(("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal"), BOTH),
    **dict.fromkeys(("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor"), BOTH),
    **dict.fromkeys(("tensor", "zeros"), BOTH),
    "as_tensor": {"device"},  # the dtype is that of the value
    "asarray": {"device"},
}
# Where one may stand: it takes seconds to walk through all modules.
SUSPECT = re.compile(rf"torch\.({'|'.join(NEEDED)})\(")


def unnamed(text: str) -> list[str]:
    """Calls of torch that leave a default to the program, with their lines."""
    found: list[str] = []
    if not SUSPECT.search(text):
        return found
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        missing = NEEDED.get(node.func.attr, frozenset()) - {keyword.arg for keyword in node.keywords}
        if missing:
            found.append(f"{node.lineno} torch.{node.func.attr}: {', '.join(sorted(missing))}")
    return found


def test_no_tensor_of_ours_takes_a_default_of_the_program() -> None:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    found = {str(path.relative_to(ROOT)): unnamed(path.read_text(encoding="utf-8")) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}, "name the dtype and the device"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("torch.zeros(3)", ["1 torch.zeros: device, dtype"]),
        ("x = 1\ntorch.tensor([1], dtype=torch.int64)", ["2 torch.tensor: device"]),
        ("torch.as_tensor(x)", ["1 torch.as_tensor: device"]),
        ("torch.empty(3, dtype=torch.float32, device='cpu'); torch.zeros_like(x); x.new_empty(3); np.zeros(3)", []),
    ],
)
def test_what_leaves_a_default_to_the_program(text: str, calls: list[str]) -> None:
    assert unnamed(text) == calls
