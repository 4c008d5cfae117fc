"""What hadolint, which `make lint` runs, does not know of the Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_image_has_the_torch_that_the_tests_run_with():
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    tested = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tested is not None
    assert f"\nARG TORCH={tested[0]}\n" in dockerfile


def test_a_build_sees_the_wheel_alone_and_an_image_is_not_roots():
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in sent if not line.startswith("#")] == ["*", "!dist/*.whl"]
    users = re.findall(r"^USER (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert users
    assert users[-1] not in ("0", "root")
