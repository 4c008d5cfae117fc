from __future__ import annotations

import argparse

import pytest
from parsed_options import given

from launcher.options.hosts import add_hosts, add_network


def test_hosts() -> None:
    options = given(add_hosts, "-H", "hosts", "--ssh-option", "A=b", "--ssh-option=C=d", "--sync-gitignore")
    assert (options.hostfile, options.ssh_option, options.sync_gitignore) == ("hosts", ["A=b", "C=d"], True)
    assert given(add_hosts).placement == "fill"
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'random'"):
        given(add_hosts, "--placement", "random")


def test_links_are_encrypted_unless_it_is_said() -> None:
    assert given(add_network).encryption is given(add_network).host_aggregation is True
    options = given(add_network, "--no-encryption", "--no-host-aggregation", "--host-ip", "10.0.0.1")
    assert (options.encryption, options.host_aggregation, options.host_ip) == (False, False, "10.0.0.1")
