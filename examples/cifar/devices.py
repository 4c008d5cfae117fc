"""The devices that the command line asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DeviceError(Exception):
    """A device that was asked for is not there."""


def find_devices(gpus: Sequence[int] | None) -> list[torch.device]:
    """The CUDA devices of these numbers, or the CPU if there are none."""
    if not gpus:
        return [torch.device("cpu")]
    there = torch.cuda.device_count()
    if missing := [number for number in gpus if number >= there]:
        what = f"only CUDA devices 0 to {there - 1}" if there else "no CUDA device"
        wrong = ",".join(map(str, missing))
        raise DeviceError(f"--gpus {wrong}: torch {torch.__version__} sees {what}; without --gpus the CPU is used")
    return [torch.device("cuda", number) for number in gpus]
