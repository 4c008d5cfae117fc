"""A job as text."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.job import batch
from launcher.job.cluster import Cluster
from launcher.job.description import RESERVED, Job
from launcher.job.output_options import OutputOptions

BYTES = st.binary(max_size=20).filter(lambda value: 0 not in value).map(os.fsdecode)


NAMES = st.from_regex(r"[A-Z_]{1,9}", fullmatch=True).filter(lambda name: name not in RESERVED)


VARIABLES = st.dictionaries(NAMES, BYTES, max_size=3)


WORDS = st.lists(BYTES, max_size=3).map(tuple)


@settings(deadline=None)
@given(VARIABLES, VARIABLES, VARIABLES, WORDS, WORDS)
def test_a_job_of_any_bytes_arrives(
    server: dict[str, str], worker: dict[str, str], environ: dict[str, str], words: Any, options: Any
) -> None:
    cluster = Cluster(
        cluster_option=options, ssh_option=options, sync_exclude=options, time="1:00:00", encryption=False
    )
    job = Job(2, 3, ("python", *words), server, worker, (*environ, "NOT_SET"), cluster, words)
    job = replace(job, output=OutputOptions(log_dir="/d", log_files=2, show=(0, 1)))
    text = batch.dumps(job, {**environ, "OTHER": "hunter2"}, "/a\udcff/end")
    assert text.isascii()
    assert "\n" not in text
    assert "hunter2" not in text
    assert batch.loads(text) == (job, environ, "/a\udcff/end")


@given(
    st.text(max_size=40)
    | st.sampled_from(["{}", "[]", "[{}, {}, 1]", "[1, 2, 3]", "[{}, 1]", '[{"cluster": {}}, {}, ""]'])
)
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="the job on standard input cannot be read"):
        batch.loads(text)


def test_a_job_that_makes_no_sense_is_refused() -> None:
    text = batch.dumps(Job(1, 1, ("x",)), {}, "")
    for before, after in (('"num_workers": 1', '"num_workers": 0'), ('"num_workers": 1', '"num_workers": "1"')):
        with pytest.raises(LaunchError):
            batch.loads(text.replace(before, after))
