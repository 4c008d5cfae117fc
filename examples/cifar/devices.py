"""The devices of the option ``--gpus``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceError(Exception):
    """A device of ``--gpus`` does not exist."""


def find_devices(gpus: Sequence[int] | None) -> list[torch.device]:
    """Return the CUDA devices with these numbers; the CPU if no numbers are given."""
    if not gpus:
        return [torch.device("cpu")]
    available = torch.cuda.device_count()
    if missing := [number for number in gpus if number >= available]:
        what = f"only CUDA devices 0 to {available - 1}" if available else "no CUDA device"
        wrong = ",".join(map(str, missing))
        raise DeviceError(f"--gpus {wrong}: torch {torch.__version__} sees {what}; without --gpus the CPU is used")
    return [torch.device("cuda", number) for number in gpus]
