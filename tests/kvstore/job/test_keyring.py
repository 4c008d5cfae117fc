from __future__ import annotations

import pytest

from kvstore.job.curve_keys import CurveKeys
from kvstore.job.keyring import ROOT, Keyring

MEMBERS = [("scheduler", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
SECRET = "0123456789abcdef0123456789abcdef"
KEYRINGS = pytest.mark.parametrize(
    "keyring",
    [Keyring.random(MEMBERS), Keyring.derived(SECRET, "kvstore-0-abc", MEMBERS)],
    ids=["random", "derived"],
)


@KEYRINGS
def test_each_member_has_its_own_keys_and_knows_all_public_ones(keyring: Keyring) -> None:
    publics = {public for public, _ in keyring.pairs.values()}
    secrets = {secret for _, secret in keyring.pairs.values()}
    assert len(publics) == len(secrets) == len(MEMBERS)
    for member in MEMBERS:
        variables = keyring.variables(*member)
        keys = CurveKeys.from_env(variables)
        assert keys is not None
        assert keys.public == keyring.pairs[member][0]
        assert (keys.root, keys.members) == (keyring.pairs[ROOT][0], publics)
        assert [secret for secret in secrets if secret in "".join(variables.values())] == [keys.secret]


@KEYRINGS
def test_the_scheduler_alone_is_told_the_observers_public_key(keyring: Keyring) -> None:
    assert keyring.observer is not None
    told = {member: keyring.variables(*member).get("KVSTORE_OBSERVER_KEY") for member in MEMBERS}
    assert {member for member, key in told.items() if key == keyring.observer[0]} == {ROOT}
    assert set(told.values()) == {keyring.observer[0], None}
    assert not [1 for member in MEMBERS if keyring.observer[1] in "".join(keyring.variables(*member).values())]
    assert keyring.observer not in keyring.pairs.values()


@KEYRINGS
def test_no_key_is_shown(keyring: Keyring) -> None:
    assert keyring.observer is not None
    assert not any(key in repr(keyring) for pair in (*keyring.pairs.values(), keyring.observer) for key in pair)


def test_random_keys_differ_each_time() -> None:
    assert not set(Keyring.random(MEMBERS).pairs.values()) & set(Keyring.random(MEMBERS).pairs.values())


def test_derived_keys_are_of_one_secret_and_one_job() -> None:
    mine = Keyring.derived(SECRET, "kvstore-0-abc", MEMBERS)
    assert Keyring.derived(SECRET, "kvstore-0-abc", MEMBERS) == mine
    for other in (Keyring.derived(SECRET, "next", MEMBERS), Keyring.derived(SECRET[::-1], "kvstore-0-abc", MEMBERS)):
        assert not set(mine.pairs.values()) & set(other.pairs.values())
