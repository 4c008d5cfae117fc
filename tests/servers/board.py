"""The shipped Grafana board and alerts: their queries, as Prometheus gets them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "servers" / "observer" / "grafana"
BOARD: dict[str, Any] = json.loads((FOLDER / "board.json").read_text(encoding="utf-8"))
ALERTS = FOLDER / "alerts.yml"

_METRIC = re.compile(r"\b(kvstore_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\b(?:by|on|group_left|without) ?\(([^)]*)\)")


@dataclass(frozen=True)
class Query:
    """An expression in PromQL, and the panel or alert that asks it."""

    title: str
    expr: str

    def filled(self, window: str, **variables: str) -> str:
        expr = self.expr.replace("$__rate_interval", window)
        for name, value in variables.items():
            expr = expr.replace(f"${name}", value)
        assert "$" not in expr, f"{self.title} has an unknown variable: {expr}"
        return expr

    def uses(self) -> dict[str, set[str]]:
        return {
            name: {part.partition("=")[0].strip(" !~") for part in (labels or "").split(",") if part}
            for name, labels in _METRIC.findall(self.expr)
        }

    def groups(self) -> set[str]:
        return {label.strip() for labels in _BY.findall(self.expr) for label in labels.split(",") if label.strip()}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    return [Query(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def alerts() -> list[Query]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [Query(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
