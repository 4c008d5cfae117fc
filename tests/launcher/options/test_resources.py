from __future__ import annotations

import argparse

import pytest
from parsed_options import given

from launcher.options.resources import add


def test_resources() -> None:
    options = given(add, "--mem", "4g", "--server-memory", "500", "--worker-cores", "4", "--job-name", "mnist-2")
    assert (options.worker_memory, options.server_memory, options.worker_cores) == ("4g", "500m", 4)
    assert (options.job_name, given(add).job_name) == ("mnist-2", "kvstore")


@pytest.mark.parametrize("name", ["a" * 41, "a-", "Mnist", "1a", ""])
def test_names_that_a_cluster_does_not_take(name: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a job name; valid: up to 40 lowercase letters"):
        given(add, "--job-name", name)
