"""An array of some other library."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Foreign:
    """DLPack, and nothing else."""

    def __init__(self, tensor: torch.Tensor | np.ndarray[Any, Any]) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()
