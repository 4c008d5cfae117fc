from __future__ import annotations

import pytest
import torch

from benchmarks.contenders import Work
from benchmarks.jobs import Unavailable
from benchmarks.suites.devices import DeviceRounds, devices

WORK = Work("tiny", 2, 1, "none", "dist_device_sync", 2)


def test_without_a_device_each_row_says_so(session):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(Unavailable, match="there is no CUDA device"):
        DeviceRounds("on one GPU", WORK, "cuda").run()
    made = session("devices", "--workers-per-host", "2", "--repeats", "1")
    devices(made)
    assert made.console.file.getvalue().count("skipped: there is no CUDA device") == 2
    assert not made.failures


@pytest.mark.release
def test_the_job_runs_with_the_stand_in():
    assert len(DeviceRounds("stand-in", WORK, "host", "cpu").run()["stand-in"]) == 2
