"""Hosts as hypothesis makes them."""

from __future__ import annotations

from hypothesis import strategies as st

from launcher.hosts.hostfile import MAX_SLOTS, Host

NAMES = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9_])?", fullmatch=True)


ADDRESSES = st.ip_addresses(v=6).map(str) | st.just("fe80::1%eth0")


USERS = st.just("") | st.from_regex(r"[A-Za-z0-9_.][A-Za-z0-9_.+$/:-]{0,20}[A-Za-z0-9_]", fullmatch=True)


PORTS = st.just(0) | st.just(22) | st.integers(1024, 65535)


HOSTS = st.builds(Host, NAMES | ADDRESSES, USERS, PORTS, st.none() | st.integers(1, MAX_SLOTS))
