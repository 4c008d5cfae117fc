"""A real Prometheus that scrapes one observer, for tests."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG, until

_CONFIG = """\
global:
  scrape_interval: {interval}
  evaluation_interval: {interval}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvstore
    authorization:
      credentials_file: {token}
    static_configs:
      - targets: ["{target}"]
"""


@dataclass(frozen=True)
class Prometheus:
    """One that runs.

    Attributes:
        url: of its HTTP API.
        target: what it scrapes: host and port.
    """

    url: str
    target: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=LONG) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def series(self, expr: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expr)["result"])

    def rules(self) -> set[str]:
        """Return how the rules for alerts are: ``ok``, ``unknown`` before they have been looked at, or ``err``."""
        return {rule["health"] for group in self.ask("rules")["groups"] for rule in group["rules"]}


@contextmanager
def prometheus(folder: Path, target: str, token: Path, rules: Path, interval: str = "1s") -> Iterator[Prometheus]:
    """Have a Prometheus that scrapes ``target`` while the block runs. The test skips where there is no Prometheus."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (.ci/run installs it)")
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(interval=interval, rules=rules, token=token, target=target))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words, "--log.level=warn"], stdout=log, stderr=log)
    try:
        until(lambda: _ready(address), "Prometheus", over=lambda: _ended(process, folder))
        yield Prometheus(f"http://{address}", target)
    finally:
        process.kill()
        process.wait()


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=LONG) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _ended(process: subprocess.Popen[bytes], folder: Path) -> str | None:
    return None if process.poll() is None else (folder / "prometheus.log").read_text()
