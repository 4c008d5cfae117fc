from __future__ import annotations

import pytest

from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.output_options import OutputOptions, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", None),
        ("none", ()),
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1,1-2", (1, 2, 3)),
        ("007", (7,)),
        ("5-5", (5,)),
    ],
)
def test_ranks(text: str, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a rank"),
        ("0,", "'' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("1-", "'1-' is not a rank"),
        ("a", "'a' is not a rank"),
        ("0 1", "'0 1' is not a rank"),
        ("²", "'²' is not a rank"),
        ("0,none", "'none' is not a rank"),
        ("3-1", "3-1 ends before it begins"),
        ("0-999999999", "0-999999999 are too many workers"),
        ("9" * 5000, "is not a rank"),
    ],
)
def test_what_names_no_ranks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; valid: all, none, or ranks of workers such as 0, 0,2 or 0,4-7"):
        parse_ranks(text)


@pytest.mark.parametrize(("workers", "valid"), [(1, "the workers' rank is 0"), (4, "the workers' ranks are 0 to 3")])
def test_a_job_has_the_workers_that_are_to_be_shown(workers: int, valid: str) -> None:
    Job(workers, 1, ("x",), output=OutputOptions(show=(0,)))
    with pytest.raises(LaunchError, match=f"--show 4: there is no worker 4; {valid}"):
        Job(workers, 1, ("x",), output=OutputOptions(show=(0, 4, 5)))


def test_only_workers_are_hidden() -> None:
    options = OutputOptions(show=(1,))
    assert [rank for rank in range(3) if options.shows("worker", rank)] == [1]
    assert options.shows("server", 0)
    assert options.shows("scheduler", 0)
    assert OutputOptions().shows("worker", 5)
