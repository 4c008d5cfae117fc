"""Which options of a cluster have been given."""

from __future__ import annotations

from dataclasses import fields

from every_option import VALUES

from launcher.job.cluster import Cluster


def test_what_is_given_is_what_is_not_at_its_default() -> None:
    assert {field.name for field in fields(Cluster)} == set(VALUES)
    assert Cluster().given() == []
    assert Cluster(**VALUES).given() == list(VALUES)
    for field, value in VALUES.items():
        assert Cluster(**{field: value}).given() == [field]
