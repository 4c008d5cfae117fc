"""The rows of the table in docs/from-mxnet.md that says where numbers differ, and what MXNet has made of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs" / "from-mxnet.md"
HEAD = "| optimizer | first weight | gradients | rates | MXNet 1.9 | here |\n"
RESULTS = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Row:
    """A row: one weight, and what it is after each update in MXNet and here."""

    optimizer: str
    options: dict[str, float]
    weight: float
    grads: list[float]
    rates: list[float]
    mxnet: list[float]
    here: list[float]

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.options}-{self.grads}-{self.rates}"


def rows() -> list[Row]:
    """Return the rows, as numbers."""
    found = []
    for line in DOCS.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0].splitlines()[1:]:
        what, *cells = line.strip("| ").split(" | ")
        name, *options = re.findall("`(.+?)`", what)
        given = {option: float(value) for option, _, value in (each.partition("=") for each in options)}
        numbers = [[float(number) for number in cell.split(",")] for cell in cells]
        found.append(Row(name, given, numbers[0][0], *numbers[1:]))
    return found


def results() -> dict[str, Any]:
    """Return what MXNet has made of the cases, and of the rows: the weight after each update."""
    made: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return made
