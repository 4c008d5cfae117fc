"""How `--live` looks."""

from __future__ import annotations

import re

import pytest

from launcher.errors import LaunchError
from launcher.output import live_table
from launcher.output.live import LiveRow
from launcher.output.live_table import LiveTable, require_rich

ROWS = [
    LiveRow(2, "worker 0", "", "running", "0:07", "", b"Epoch[0] " + b"x" * 99),
    LiveRow(3, "worker 1", "", "failed", "1:00", "", b"exited with code 1; no data"),
    LiveRow(0, "scheduler", "", "running", "12:00", "11:00", b""),
]


def test_a_line_for_each_process() -> None:
    drawn = LiveTable(color=False).draw(ROWS, "and 2 more: 2 ended", 60).decode()
    assert drawn.split("\n") == [
        "process    state      for  silent  last line",
        "worker 0   running   0:07          Epoch[0] xxxxxxxxxxxxxxx…",
        "worker 1   failed    1:00          exited with code 1; no d…",
        "scheduler  running  12:00   11:00",
        "and 2 more: 2 ended",
    ]


def test_hosts_are_shown_where_there_are_any() -> None:
    rows = [ROWS[0]._replace(host="node7.cluster.example.org"), ROWS[2]]
    assert LiveTable(color=False).draw(rows, "", 60).decode().split("\n") == [
        "process    host                  state      for  silent  la…",
        "worker 0   node7.cluster.examp…  running   0:07          Ep…",
        "scheduler                        running  12:00   11:00",
    ]


def test_colors_are_as_in_the_prefixes_of_lines() -> None:
    drawn = LiveTable(color=True).draw(ROWS, "", 60)
    assert b"\x1b[35mworker 0" in drawn
    assert b"\x1b[1;31mfailed" in drawn


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("width", [1, 10, 40, 200])
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\xff\xfe", b"\x1b[2J\x1b[10;10Hgone", b"\x1b]0;title\x07", b"\x1b[31mred", b"\x1b[3", b"\x1bc"),
        *(b"a\tb\bc", b"[bold]x[/bold] :smile:", "漢字\N{COMBINING DIAERESIS}".encode() * 50, b"x" * 100_000),
    ],
)
def test_no_text_leaves_its_line(text: bytes, width: int, color: bool) -> None:
    drawn = LiveTable(color).draw([LiveRow(0, "worker 0", "", "running", "0:01", "", text)], "", width)
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", drawn).decode()
    assert plain.count("\n") == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", plain)
    if not color:
        assert b"\x1b" not in drawn
    if text.startswith(b"[bold]") and width == 200:
        assert plain.endswith("[bold]x[/bold] :smile:")


def test_without_rich_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_rich()
    monkeypatch.setattr(live_table, "find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=re.escape("--live needs rich, which is not installed: pip install")):
        require_rich()
