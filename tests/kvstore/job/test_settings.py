"""The table of settings: what each accepts, what an error says, and that the documentation agrees with the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.job import settings
from kvstore.job.config import Config
from kvstore.job.settings import SETTINGS, Setting
from kvstore.job.valid_values import (
    ClassReference,
    ClassReferences,
    EarlierEnd,
    Flag,
    Integer,
    OneOf,
    RoundFaults,
    RoundWindow,
    RoundWindows,
    Seconds,
    Text,
)

ROOT = Path(__file__).parents[3]
PACKAGES = ("kvstore", "servers", "launcher", "workers", "examples")
NAMES = {name: setting for setting in SETTINGS for name in (setting.name, *setting.aliases)}
NO_SETTINGS = {"KVSTORE_END_OF_JOB"}  # the end of a here-document in a batch script


def test_all_settings_are_in_the_table_once() -> None:
    defined = [value for value in vars(settings).values() if isinstance(value, Setting)]
    assert sorted(map(id, defined)) == sorted(map(id, SETTINGS))
    assert len(NAMES) == sum(1 + len(each.aliases) for each in SETTINGS)


def test_defaults_are_valid_values() -> None:
    for each in SETTINGS:
        if each.default not in ("", 0, -1, ()):
            assert each.read({each.name: str(each.default)}) == each.default, each.name


def test_config_has_the_defaults_of_the_table() -> None:
    assert Config.from_env({}) == Config()


def test_every_variable_that_the_code_names_is_in_the_table() -> None:
    named = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r"""["']((?:KVSTORE|DMLC|MXNET)_[A-Z][A-Z_0-9]*)["']""", path.read_text()))
    assert named - NO_SETTINGS <= set(NAMES)


# ---- documentation


def rows(path: Path) -> dict[str, list[str]]:
    """The rows of the tables in ``path`` whose first cell names variables: the cells, by what is in the first one."""
    found = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and re.match(r"`[A-Z_]+`", cells[0]):
            found[cells[0]] = cells
    return found


def test_docs_settings_has_every_row_of_the_table() -> None:
    documented = (ROOT / "docs" / "settings.md").read_text().splitlines()
    missing = [each.row for each in SETTINGS if each.row not in documented]
    assert not missing, "python -m kvstore.job.settings prints the tables for docs/settings.md"
    assert set(rows(ROOT / "docs" / "settings.md")) == {each.row.strip("|").split("|")[0].strip() for each in SETTINGS}


def test_readme_names_about_ten_settings_with_the_defaults_of_the_table() -> None:
    documented = rows(ROOT / "README.md")
    assert 8 <= len(documented) <= 12
    for cells in documented.values():
        (name,) = re.findall(r"`([A-Z_]+)`", cells[0])
        assert cells[1] == NAMES[name].shown_default, name


def setting(values: Any, default: Any = None, *aliases: str) -> Setting[Any]:
    return Setting("KVSTORE_X", values, default, "what it is for", aliases=aliases)


def test_the_default_stands_for_what_is_not_set_or_empty() -> None:
    number = setting(Integer(0), 7)
    assert number.read({}) == number.read({"KVSTORE_X": " "}) == 7
    assert number.read({}, 8) == 8
    assert number.read({"KVSTORE_X": "9"}, 8) == 9


def test_the_name_goes_before_its_aliases() -> None:
    number = setting(Integer(0), 0, "OLD_X")
    assert number.read({"OLD_X": "3"}) == 3
    assert number.read({"OLD_X": "3", "KVSTORE_X": "4"}) == 4
    with pytest.raises(ConfigError, match=r"^OLD_X='x'"):
        number.read({"OLD_X": "x"})


@pytest.mark.parametrize(
    ("values", "text", "value"),
    [
        *((Flag(), text, True) for text in ("1", "true", "True", "YES", "on", " on ")),
        *((Flag(), text, False) for text in ("0", "false", "FALSE", "no", "Off")),
        (Integer(0), "0", 0),
        (Integer(1, 65535), "65535", 65535),
        (Seconds(), "0.001", 0.001),
        (Seconds(0), "0", 0.0),
        (EarlierEnd(), "exit code 7 1234.5", ("exit code 7", 1234.5)),
        (RoundFaults(), "stop:100, kill:9", (("kill", 9), ("stop", 100))),
        (OneOf(("tcp", "zeromq")), "ZeroMQ", "zeromq"),
        (Text("anything"), " a b ", "a b"),
        (RoundWindows(), "100", RoundWindow(1, 100)),
        (RoundWindows(), "500-600", RoundWindow(500, 600)),
        (RoundWindows(), "None", RoundWindow()),
        (ClassReferences(), "a.b:C", (ClassReference("c", "a.b", "C"),)),
        (ClassReferences(), "X=a:C.D, e:F,", (ClassReference("x", "a", "C.D"), ClassReference("f", "e", "F"))),
    ],
)
def test_what_a_setting_accepts(values: Any, text: str, value: Any) -> None:
    found = setting(values).read({"KVSTORE_X": text})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("values", "text", "valid"),
    [
        (Flag(), "2", "1 or 0, true or false, yes or no, on or off"),
        (Integer(1), "0", "an integer, at least 1"),
        (Integer(1), "1.5", "an integer, at least 1"),
        (Integer(1, 65535), "65536", "an integer, from 1 to 65535"),
        (EarlierEnd(), "SIGKILL", "words and a number of seconds, such as `SIGKILL 1234.5`"),
        (EarlierEnd(), "SIGKILL at noon", "words and a number of seconds, such as `SIGKILL 1234.5`"),
        *((RoundWindows(), text, RoundWindows.valid) for text in ("0", "9-8", "1-", "-3", "1-2-3", "x", "1" * 16)),
        (Seconds(), "x", "a number of seconds, greater than 0"),
        (Seconds(), "0", "a number of seconds, greater than 0"),
        (Seconds(0.01), "0.001", "a number of seconds, at least 0.01"),
        (Seconds(0), "inf", "a number of seconds, at least 0"),
        (Seconds(0), "nan", "a number of seconds, at least 0"),
        (OneOf(("tcp", "zeromq")), "udp", "tcp, zeromq"),
        *(
            (ClassReferences(), text, ClassReferences.valid)
            for text in ("Lion", "a:", ":C", "a-b:C", "a:C()", "x y=a:C", "a:C;b:D", "a:C,b:C", "a:C b:D", "=a:C")
        ),
    ],
)
def test_an_error_says_what_was_given_and_what_is_valid(values: Any, text: str, valid: str) -> None:
    with pytest.raises(ConfigError) as caught:
        setting(values).read({"KVSTORE_X": text})
    assert str(caught.value) == f"KVSTORE_X={text!r} is not valid; valid: {valid}"
