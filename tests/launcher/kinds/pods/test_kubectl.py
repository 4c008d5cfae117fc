"""kubectl as a program to run, and to listen to."""

from __future__ import annotations

import pytest
from pod_jobs import job

from launcher.errors import LaunchError
from launcher.kinds import kubernetes


def test_there_must_be_a_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="needs kubectl on PATH") as caught:
        kubernetes.run(job(), lambda task, how: None)
    assert caught.value.exit_code == 127
