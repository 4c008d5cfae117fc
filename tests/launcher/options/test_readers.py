from __future__ import annotations

from pathlib import Path

from parsed_options import given

from launcher.options.readers import add


def test_the_file_is_where_launch_py_was_started() -> None:
    options = given(add, "--readers", "job.json")
    assert (options.readers, options.max_readers) == (str(Path("job.json").absolute()), 64)
    assert given(add).readers is None
