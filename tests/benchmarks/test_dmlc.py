"""The members of a job as MXNet's launchers start them."""

from __future__ import annotations

from places import HOSTS

from benchmarks.dmlc import Layout, members
from benchmarks.jobs import HERE


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
