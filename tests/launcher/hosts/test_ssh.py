"""The command lines of ssh and rsync."""

from __future__ import annotations

from any_host import HOSTS
from hypothesis import given

from launcher.hosts.hostfile import Host
from launcher.job.description import Cluster
from launcher.kinds.ssh import remote_command, rsync


@given(HOSTS)
def test_nothing_of_a_hostfile_is_an_option_of_ssh_or_rsync(host: Host) -> None:
    cluster = Cluster(sync_exclude=("*.pt",), sync_gitignore=True, ssh_config="cfg", ssh_option=("Port=1",))
    words = remote_command(cluster, host, ["py thon", "-c", "it's"])
    end = words.index("--")
    assert words[end + 1 :] == [host.name, "exec 'py thon' -c 'it'\"'\"'s'"]
    assert words[:9] == ["ssh", "-T", "-x", "-F", "cfg", "-o", "Port=1", "-o", "BatchMode=yes"]
    assert ("-p" in words[:end], "-l" in words[:end]) == (bool(host.port), bool(host.user))
    copied = rsync(cluster, host, "/from/", "/to")
    assert copied[copied.index("--") + 1] == "/from/"
    assert copied[-1].endswith("/to/")
    assert len(copied) == copied.index("--") + 3
    assert ("-e" in copied) != host.here
