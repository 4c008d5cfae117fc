from __future__ import annotations

import pytest

from kvstore.files import replacing


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    def fail():
        with replacing(tmp_path / "file") as part:
            part.write_text("half")
            raise OSError("disk full")

    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
