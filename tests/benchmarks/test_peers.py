"""The environments of peers."""

from __future__ import annotations

import pytest

from benchmarks import peers as peers_module
from benchmarks.jobs import Unavailable
from benchmarks.peers import Peers, default_cache


def test_environments_of_peers_are_made_once_in_a_cache(tmp_path, monkeypatch):
    ran = []

    def pretend(argv):
        ran.append(argv[1:3])
        if argv[1] == "-c" or "pip" in argv:
            raise Unavailable("no network")

    monkeypatch.setattr(peers_module, "run", pretend)
    monkeypatch.setattr(peers_module, "old_python", lambda: "python3")
    with pytest.raises(Unavailable, match="no network"):
        Peers(("mxnet",), tmp_path).mxnet()
    assert ran == [["-c", "import mxnet"], ["-m", "venv"], ["-m", "pip"]]
    monkeypatch.setattr(peers_module, "run", lambda argv: None)
    assert Peers(("mxnet",), tmp_path / "made").mxnet() == str(tmp_path / "made" / "mxnet" / "bin" / "python")
    assert Peers(("openmpi",), tmp_path / "made").openmpi() == str(tmp_path / "made" / "openmpi" / "bin" / "python")


def test_the_cache_is_the_users_or_the_one_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "kvstore-bench"
    monkeypatch.setenv("KVSTORE_BENCH_PEERS", "/elsewhere")
    assert str(default_cache()) == "/elsewhere"
