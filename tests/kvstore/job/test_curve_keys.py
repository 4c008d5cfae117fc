"""A job's keys: what the environment must have, and how an address carries one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from jobkeys import variables
from zmq.utils import z85

from kvstore import wire
from kvstore.errors import ConfigError
from kvstore.job.curve_keys import LENGTH, ROOT, VARIABLES, CurveKeys, Keyring, is_key, pair, split_key, with_key

ENV = variables(3)[1]
FIRST, OTHER = "0" * LENGTH, "1" * LENGTH


def test_a_pair_is_one() -> None:
    public, secret = pair()
    assert zmq.curve_public(secret.encode()) == public.encode()
    assert pair() != (public, secret)


def test_what_a_process_is_given() -> None:
    keys = CurveKeys.from_env({name: f" {text}\n" for name, text in ENV.items()})
    assert keys is not None
    assert keys.secret == ENV["KVSTORE_SECRET_KEY"]
    assert keys.root == ENV["KVSTORE_ROOT_KEY"]
    assert keys.members == set(ENV["KVSTORE_MEMBER_KEYS"].split(","))
    assert keys.public == ENV["KVSTORE_MEMBER_KEYS"].split(",")[1]


@pytest.mark.parametrize("env", [{}, dict.fromkeys(VARIABLES, ""), {"KVSTORE_SECRET_KEY": " "}])
def test_no_keys_at_all(env: dict[str, str]) -> None:
    assert CurveKeys.from_env(env) is None


@pytest.mark.parametrize("missing", [{name} for name in VARIABLES] + [set(VARIABLES) - {name} for name in VARIABLES])
def test_some_are_missing(missing: set[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        CurveKeys.from_env({name: text for name, text in ENV.items() if name not in missing})
    given, absent = str(caught.value).partition(":")[0].split(" set without ")
    assert {name for name in VARIABLES if name in absent} == missing
    assert {name for name in VARIABLES if name in given} == set(VARIABLES) - missing
    assert_no_secret(caught.value)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: '"' + text[1:],
        lambda text: "é" + text[1:],
        lambda text: "#" * 5 + text[5:],
        lambda text: text + ",",
        lambda text: text[:20] + " " + text[21:],
    ],
    ids=["short", "long", "quoted", "not ascii", "beyond 32 bits", "a comma", "a space"],
)
def test_what_is_no_key_is_named_and_not_shown(name: str, change) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not valid; valid: 40 characters of Z85") as caught:
        CurveKeys.from_env({**ENV, name: change(ENV[name])})
    assert_no_secret(caught.value)


def test_keys_of_different_jobs() -> None:
    other = variables(1)[0]
    with pytest.raises(ConfigError, match="KVSTORE_ROOT_KEY is not among KVSTORE_MEMBER_KEYS"):
        CurveKeys.from_env({**ENV, "KVSTORE_ROOT_KEY": other["KVSTORE_ROOT_KEY"]})
    keys = CurveKeys.from_env({**ENV, "KVSTORE_SECRET_KEY": other["KVSTORE_SECRET_KEY"]})
    assert keys is not None
    with pytest.raises(ConfigError, match="KVSTORE_SECRET_KEY belongs to none"):
        _ = keys.public


def assert_no_secret(error: Exception) -> None:
    for text in ENV.values():
        assert text[5:20] not in str(error)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_an_address(key: bytes) -> None:
    text = z85.encode(key).decode()
    assert is_key(text)
    endpoint = with_key("tcp://[fe80::1%eth0]:5555", text)
    assert split_key(endpoint) == ("tcp://[fe80::1%eth0]:5555", text)
    assert endpoint.isascii()
    assert not set(endpoint.partition("?key=")[2]) & set("?&=/: #,'\"<>")
    assert wire.Join(wire.Sender(wire.Node("server", 0, 0), 1, 0), address=endpoint).address == endpoint
    assert wire.Welcome(1, 0, 0, 1, [endpoint]).servers == [endpoint]


def test_an_address_without_a_key() -> None:
    assert split_key("tcp://10.0.0.1:5") == ("tcp://10.0.0.1:5", "")
    assert split_key("ipc:///run/job/server-0") == ("ipc:///run/job/server-0", "")


@pytest.mark.parametrize("key", ["", "abc", "%", FIRST + "0", FIRST + "?key=" + OTHER])
def test_an_address_with_something_else(key: str) -> None:
    with pytest.raises(ConfigError, match=r"the key of the address tcp://10.0.0.1:5 is not valid"):
        split_key(f"tcp://10.0.0.1:5?key={key}")


def test_settings_and_addresses_are_read_without_zeromq() -> None:
    code = (
        "import sys, kvstore.job.address, kvstore.job.curve_keys; "
        "from kvstore.job.config import Config; Config.from_env(); "
        "assert not {'zmq', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={**ENV, "PYTHONPATH": ":".join(sys.path)}, check=True)


MEMBERS = [("scheduler", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
SECRET = "0123456789abcdef0123456789abcdef"
KEYRINGS = pytest.mark.parametrize(
    "keyring", [Keyring.random(MEMBERS), Keyring.derived(SECRET, "kvstore-0-abc", MEMBERS)], ids=["random", "derived"]
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
