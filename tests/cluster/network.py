"""A network of its own: a switch in a namespace, an uplink to where the tests run, and addresses that nobody answers.

The switch is out of reach of the machine's firewall, and the subnet is one that the machine has no route to.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Sequence
from pathlib import Path

from cluster.namespaces import Failed, Namespace, call

# What each may send is capped with so large a bucket that a full-speed sender is never starved by the timer.
# On the link that this belongs to, nobody is; what is sent there is lost without a word.
NOWHERE = "02:6b:76:00:00:fe"
OUTSIDE, REFUSING, SILENT, NOBODY = 254, 253, 252, 251


class Network:
    """A switch, with the process that makes it as one of its neighbours.

    Args:
        uplink: the name of the interface by which the machine itself is on the network.
        directory: for its files.

    Nobody else may make one meanwhile.
    """

    def __init__(self, uplink: str, directory: Path) -> None:
        self.uplink = uplink
        script = (
            "ip link add bridge type bridge mcast_snooping 0; ip link set bridge up; echo ready; exec sleep infinity"
        )
        self._switch = Namespace(script, (), ["--net"], directory / "switch.log")
        try:
            number = self._claim()
        except BaseException:
            self.end()
            raise
        self._v4, self._v6 = f"10.77.{number}", f"fd77:0:{number:x}:"
        self._inside(
            f"addr add {self.v4(REFUSING)}/24 dev bridge",
            f"addr add {self.v6(REFUSING)}/64 dev bridge nodad",
            "link set up0 up master bridge",
        )
        _ip(
            f"addr add {self.v6(OUTSIDE)}/64 dev {uplink} nodad",
            f"link set {uplink} up",
            *(f"neigh replace {address} lladdr {NOWHERE} dev {uplink}" for address in self.silent),
        )

    def v4(self, number: int) -> str:
        """The address of one on it."""
        return f"{self._v4}.{number}"

    def v6(self, number: int) -> str:
        """The other address of one on it."""
        return f"{self._v6}:{number:x}"

    @property
    def subnet(self) -> str:
        """The subnet, with its length."""
        return f"{self._v4}.0/24"

    @property
    def silent(self) -> tuple[str, str]:
        """Addresses that swallow all that is sent to them."""
        return self.v4(SILENT), self.v6(SILENT)

    def plug(self, host: Namespace, number: int) -> None:
        """Put a namespace on the network, as ``eth0``."""
        self._inside(
            f"link add port{number} type veth peer name eth0 netns {host.pid}",
            f"link set port{number} up master bridge",
        )
        commands = [
            "link set lo up",
            f"addr add {self.v4(number)}/24 dev eth0",
            f"addr add {self.v6(number)}/64 dev eth0 nodad",
            "link set eth0 up",
            *(f"neigh replace {address} lladdr {NOWHERE} dev eth0" for address in self.silent),
        ]
        there = ["nsenter", "--target", f"{host.pid}", "--net", "ip", "-batch", "-"]
        call(*there, text="\n".join(commands) + "\n")

    def cut(self, number: int) -> None:
        """What one sends and what is sent to it is lost; it still sees a link, as if a cable were cut further on."""
        self._inside(f"link set port{number} nomaster")

    def mend(self, number: int) -> None:
        """Undo a cut."""
        self._inside(f"link set port{number} master bridge")

    def end(self) -> None:
        """Remove it."""
        self._switch.end()
        if Path(f"/sys/class/net/{self.uplink}").exists():
            try:
                call("ip", "link", "del", self.uplink)
            except Failed:
                assert not Path(f"/sys/class/net/{self.uplink}").exists(), "the kernel was not about to remove it"

    def _claim(self) -> int:
        """Put the uplink on a subnet that the machine knows nothing of."""
        call("ip", "link", "add", self.uplink, "type", "veth", "peer", "name", "up0", "netns", f"{self._switch.pid}")
        known = _known()
        for step in range(250):
            number = (os.getpid() + step) % 250 + 1  # begins anywhere: a subnet just left may still be known somewhere
            subnet = ipaddress.ip_network(f"10.77.{number}.0/24")
            if not any(subnet.overlaps(other) for other in known):
                call("ip", "addr", "add", f"10.77.{number}.{OUTSIDE}/24", "dev", self.uplink)
                return number
        raise Failed("no subnet of 10.77.0.0/16 is free")

    def _inside(self, *commands: str) -> None:
        call(*self._switch.enter(["ip", "-batch", "-"]), text="\n".join(commands) + "\n")


def _known() -> Sequence[ipaddress.IPv4Network]:
    """Every subnet that the machine has an address or a route in, but for the default route and vast ones."""
    addresses = json.loads(call("ip", "-j", "-4", "addr"))
    found = [f"{one['local']}/{one['prefixlen']}" for link in addresses for one in link.get("addr_info", ())]
    found += [route["dst"] for route in json.loads(call("ip", "-j", "-4", "route")) if route["dst"] != "default"]
    subnets = [ipaddress.IPv4Network(one, strict=False) for one in found]
    return [subnet for subnet in subnets if subnet.prefixlen > 8]


def _ip(*commands: str) -> None:
    call("ip", "-batch", "-", text="\n".join(commands) + "\n")
