"""Contenders that are not ours, their environments, and the models that they train."""

from __future__ import annotations

import pytest
import torch
from places import HOSTS

from benchmarks import peers as peers_module
from benchmarks.contenders import placed, ranks, threads_at
from benchmarks.dmlc import Layout, members
from benchmarks.jobs import HERE, Unavailable
from benchmarks.models import MODELS, build, pictures
from benchmarks.peers import Peers, default_cache
from kvstore.job.threads import WAITING

# ---- contenders that are not ours


def test_ranks_of_gloo_know_their_interface_where_they_are_in_a_host():
    made = ranks(["sum"], [HERE, HOSTS[0]])
    assert made[0].env == {"RANK": "0", "WORLD_SIZE": "2"}
    assert made[1].env == {"RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contenders.cores", lambda: 2)
    for name in ("OMP_NUM_THREADS", *WAITING):
        monkeypatch.delenv(name, raising=False)


def test_members_of_a_role_share_the_cores_of_their_host_as_launch_py_divides_them(two_cores: None) -> None:
    assert threads_at("server", [HERE, HERE]) == {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    assert threads_at("server", HOSTS[:2]) == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    assert threads_at("server", [HERE], {"OMP_NUM_THREADS": "1"}) == {"OMP_WAIT_POLICY": "passive"}


def test_a_job_on_hosts_has_the_threads_of_a_job_that_launch_py_starts(two_cores: None) -> None:
    made = placed(Layout([HERE, HERE], [HERE]), ["train"], {"MINE": "m"})
    told = {member.name: (member.env["MINE"], member.env.get("OMP_NUM_THREADS")) for member in made}
    assert told == {"scheduler 0": ("m", None), "server 0": ("m", "2"), "worker 0": ("m", "1"), "worker 1": ("m", "1")}


def test_a_jobs_members_have_the_environment_of_mxnets_launchers():
    made = members(Layout(HOSTS, HOSTS[1:]), servers=["serve"], workers=["work"], env={"A": "b"})
    assert [member.name for member in made] == ["scheduler 0", "server 0", "worker 0", "worker 1"]
    assert [member.argv for member in made] == [["serve"], ["serve"], ["work"], ["work"]]
    assert made[3].env | {"DMLC_PS_ROOT_PORT": "any"} == {
        "A": "b",
        "DMLC_NODE_HOST": "10.77.0.2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_PS_ROOT_PORT": "any",
        "DMLC_PS_ROOT_URI": "10.77.0.1",
        "DMLC_ROLE": "worker",
        "DMLC_TASK_ID": "1",
    }
    assert len({member.env["DMLC_PS_ROOT_PORT"] for member in made}) == 1
    assert made[1].place.wrap(["serve"])[:4] == ["ip", "netns", "exec", "host2"]
    assert made[1].place.wrap(["serve"])[-2:] == ["/dev/shm/host2", "serve"]
    assert HERE.wrap(["serve"]) == ["serve"]


# ---- the environments of peers


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


# ---- models to train


@pytest.mark.parametrize(("name", "millions"), [("resnet8", 0.078), ("resnet18", 11.17)])
def test_models(name, millions):
    numbers = sum(parameter.numel() for parameter in build(name).parameters())
    assert numbers / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_model_classifies_pictures_and_is_the_same_each_time():
    images, labels = pictures(seed=3)
    assert build("resnet8")(images).shape == (16, 10)
    assert labels.max() < 10
    assert torch.equal(pictures(seed=3)[0], images)
    assert not torch.equal(pictures(seed=4)[0], images)
    for one, other in zip(build("resnet8").parameters(), build("resnet8").parameters(), strict=True):
        assert torch.equal(one, other)
    assert set(MODELS) == {"resnet8", "resnet18"}
