from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from parsed_options import given

from launcher.errors import LaunchError
from launcher.job.output_options import OutputOptions
from launcher.options.output import add, read


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], OutputOptions()),
        (["--log-dir", "/d", "--log-size", "500K", "--log-files", "1"], OutputOptions("/d", 500 << 10, 1)),
        (["--log-dir", "d"], OutputOptions(str(Path("d").absolute()))),
        (["--show", "none"], OutputOptions(show=(), scroll=True)),
        (["--show=0,2-3"], OutputOptions(show=(0, 2, 3), scroll=True)),
        (["--live", "--show", "all"], OutputOptions(live=True, scroll=True)),
        (["--live", "--log-dir", "/d"], OutputOptions("/d", live=True)),
    ],
)
def test_what_the_options_say(words: list[str], options: OutputOptions) -> None:
    assert read(given(add, *words)) == options


@pytest.mark.parametrize("text", ["", "16", "0m", "63k", "-1m", "1.5g", "16mb", "9" * 5000 + "k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a size from 64k on; valid: such as 500k, 16m or 1g"):
        given(add, f"--log-size={text}")


def test_ranks_that_are_none() -> None:
    with pytest.raises(argparse.ArgumentError, match="argument --show: 'x' is not a rank; valid: all, none, or ranks"):
        given(add, "--show", "x")


def test_live_alone_would_lose_lines() -> None:
    with pytest.raises(LaunchError, match="--live shows the last line of each process; say where the others go"):
        read(given(add, "--live"))
