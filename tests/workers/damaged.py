"""Files of a checkpoint that say something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Let ``change`` have what a file of a checkpoint says, and its tensors, and write them again."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(file.metadata()["about"])
    change(about, tensors)
    save_file(tensors, path, {"about": json.dumps(about)})
