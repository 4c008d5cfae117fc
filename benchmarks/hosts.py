"""Several hosts on one machine: network namespaces on one switch.

Each has a limit to what it sends, a name, and its own shared memory. The switch has a namespace of its own, so nothing
of it is seen outside: no address can clash, no firewall interferes, and to remove the namespaces is to remove
everything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.jobs import Place, Unavailable
from benchmarks.wire import bytes_a_ms

INTERFACE = "eth0"
NETWORK = "10.77.0"
MTU = 1500
SHM = Path("/dev/shm")  # noqa: S108
# So large a bucket that a full-speed sender is never starved by the timer, and that the system's largest packets fit.
# What a line has saved up while it was idle, it sends at once, and a real one does not: no larger than that.
BUCKET_MS = 4
BUCKET_BYTES = 80_000


@contextlib.contextmanager
def hosts(count: int, rate: str = "1gbit", mtu: int = MTU) -> Iterator[list[Place]]:
    """Make ``count`` hosts; at the end of the block they are removed with all their processes.

    Args:
        count: how many.
        rate: how much each may send, in the words of ``tc``.
        mtu: bytes of a packet, but for Ethernet's header.

    Raises:
        Unavailable: they cannot be made here; the message says why.
    """
    require()
    mark = f"kvbench-{secrets.token_hex(3)}"
    switch, names = f"{mark}-switch", [f"{mark}-{number}" for number in range(1, count + 1)]
    memories = [SHM / name for name in names]
    try:
        for memory in memories:
            memory.mkdir()
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            _add_host(switch, name, number, rate, mtu)
        yield [Place(f"{NETWORK}.{number}", name, str(SHM / name)) for number, name in enumerate(names, 1)]
    finally:
        for name in [*names, switch]:
            _remove(name)
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)


def require() -> None:
    """Raise ``Unavailable`` unless this machine can make hosts."""
    if os.geteuid() != 0:
        raise Unavailable(
            "hosts are network namespaces, which need root: sudo -E .venv/bin/python -m benchmarks network"
        )
    missing = [tool for tool in ("ip", "tc", "mount", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"hosts need {' and '.join(missing)}; on Debian and Ubuntu: apt-get install iproute2")


def line(rate: str, mtu: int = MTU) -> str:
    """Describe the hosts' links."""
    return rate if mtu == MTU else f"{rate}, packets of {mtu:,} bytes"


def limit(rate: str) -> list[str]:
    """Return the words of ``tc`` for a token bucket of a rate; no packet is dropped in 0.1 s of queue."""
    bucket = max(BUCKET_BYTES, round(BUCKET_MS * bytes_a_ms(rate)))
    return ["rate", rate, "burst", str(bucket), "latency", "100ms"]


def sent(host: Place) -> int:
    """Return the number of bytes that ``host`` has sent, including headers."""
    path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    return int(run(*host.wrap(["cat", path])))


def _add_host(switch: str, name: str, number: int, rate: str, mtu: int) -> None:
    port = f"port{number}"
    _ip("netns", "add", name)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("-n", switch, "link", "set", port, "mtu", f"{mtu}", "master", "bridge", "up")
    _ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "set", INTERFACE, "mtu", f"{mtu}", "up")
    run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit(rate))


def _remove(name: str) -> None:
    """End the processes in a namespace and remove it, if it exists."""
    with contextlib.suppress(Unavailable):
        for _ in range(50):
            running = _ip("netns", "pids", name).split()
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not running:
                break
            time.sleep(0.02)
        _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return run("ip", *words)


def run(*words: str) -> str:
    """Return what a command prints; raise ``Unavailable`` if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
