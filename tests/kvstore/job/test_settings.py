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
from kvstore.job.valid_values import Integer

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
