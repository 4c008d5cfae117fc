"""What members are told of each other; see also test_core for aggregators, and test_identity for keys."""

from __future__ import annotations

from servers.scheduler.members import JobMember, Members, Welcomes


def test_a_welcome_says_where_servers_are_now_and_is_not_changed_afterwards():
    members = Members(1, 2, 1.0)
    for nonce, role in enumerate(["worker", "server", "server"]):
        members.join(JobMember(role, nonce, -1, f"at {nonce}", b"link", nonce, f"key {nonce}"))
    members.settle(0.0)
    welcomes = Welcomes(members)
    worker, server, _ = members.everyone
    before = welcomes.of(worker)
    assert (before.seq, before.rank, before.num_workers, before.servers) == (0, 0, 1, ["at 1", "at 2"])
    assert (before.worker_keys, welcomes.of(server).worker_keys) == ([], ["key 0"]), "keys are for servers"
    welcomes.servers[1] = "elsewhere"
    assert welcomes.of(worker).servers == ["at 1", "elsewhere"]
    assert before.servers == ["at 1", "at 2"]
