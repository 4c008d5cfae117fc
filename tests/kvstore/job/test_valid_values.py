"""What each kind of value accepts, and what an error says of the others."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.job.settings import Setting
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


def setting(values: Any) -> Setting[Any]:
    return Setting("KVSTORE_X", values, None, "what it is for")


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
