"""Each measurement once, with fewer rounds for the long ones."""

from __future__ import annotations

from benchmarks.suites import everything as suite

ONCE = ("pushpull", "small", "asynchronous", "train", "encryption", "memory")


def test_every_measurement_is_made_once(session, monkeypatch):
    made = []
    for name in (*ONCE, "network", "scale"):
        monkeypatch.setattr(suite, name, lambda session, name=name, **_: made.append((name, session.options)))
    suite.everything(session("all", "--peers", "mxnet,gloo"))
    assert [name for name, _ in made] == [*ONCE, "network", "scale"]
    options = dict(made)
    assert {options[name].repeats for name in ONCE} == {1}
    assert list(options["network"].peers) == ["gloo"]
    assert list(options["scale"].peers) == []
    assert options["scale"].rounds == 4
