"""Contenders that are not ours, their environments, and the models that they train."""

from __future__ import annotations

import pytest
from places import HOSTS

from benchmarks.contenders import placed, threads_at
from benchmarks.dmlc import Layout, members
from benchmarks.jobs import HERE
from kvstore.job.threads import WAITING

# ---- contenders that are not ours


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
