"""Where servers and the scheduler listen: unix sockets beside the job's, or TCP at one address of this host."""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.address import Address, choose, host_and_port, is_any, is_here, is_loopback, resolve, tcp_endpoint
from kvstore.job.config import Config
from kvstore.job.curve_keys import VARIABLES, split_key, with_key

log = logging.getLogger(__name__)


def server_endpoint(config: Config, name: str) -> str:
    """Return where the server ``name`` is to listen."""
    if not config.root.startswith("tcp://"):
        return f"ipc://{Path(config.root.removeprefix('ipc://')).parent / name}"
    return tcp_endpoint(_chosen(config).ip, "0")


def scheduler_endpoint(config: Config) -> str:
    """Return where the scheduler is to listen: at the root, if that is an address of this host.

    Else the root may be that of a cluster's service, which forwards to the same port of this host.
    """
    if config.root_fd >= 0 or not config.root.startswith("tcp://"):
        return config.root
    host, port = _split(config.root)
    addresses = _known(host)
    if any(map(is_any, addresses)):
        raise ConfigError(
            f"DMLC_PS_ROOT_URI={host} is an address to listen at, not one to connect to; "
            "give the address by which all members reach the scheduler"
        )
    address = next(filter(is_here, addresses), None)
    if address is None:
        address = _chosen(config).ip
        level = logging.WARNING if host in addresses else logging.INFO  # a number is more likely to be a mistake
        log.log(level, "the scheduler listens at %s: DMLC_PS_ROOT_URI=%s is not an address of this host", address, host)
    elif is_loopback(address) and not is_loopback(host):
        log.warning("DMLC_PS_ROOT_URI=%s is %s here, where no other host reaches the scheduler", host, address)
    endpoint, key = tcp_endpoint(address, port), split_key(config.root)[1]
    return with_key(endpoint, key) if key else endpoint


def warn_if_open(config: Config, endpoint: str) -> None:
    """Log a warning if strangers can reach ``endpoint`` and links are not encrypted, unless that is wanted."""
    if not config.encryption or config.keys is not None or not endpoint.startswith("tcp://"):
        return
    if not is_loopback(_split(endpoint)[0]):
        log.warning(
            "links are not encrypted, and whoever reaches %s can join this job. launch.py gives each process keys; "
            "where something else starts them, set %s (in Kubernetes by a Secret). KVSTORE_ENCRYPTION=0 says that the "
            "network is trusted, and that this need not be said",
            endpoint,
            ", ".join(VARIABLES),
        )


def _chosen(config: Config) -> Address:
    host = _split(config.root)[0]
    if not config.node_host and not _known(host):
        log.warning("%s cannot be resolved here yet", host)
        toward = ""
    else:
        toward = host
    interface = "" if is_loopback(host) else config.interface
    address = choose(host=config.node_host, interface=interface, toward=toward)
    if address.others and address.ip not in _known(host):  # the scheduler's own host is reached where it is
        log.warning("this host is %s: %s. DMLC_INTERFACE or DMLC_NODE_HOST chooses another", address.ip, address.why)
    else:
        log.info("this host is %s: %s", address.ip, address.why)
    return address


def _known(host: str) -> list[str]:
    """Return the addresses of ``host``; none if its name does not resolve, as before a cluster's service is ready."""
    try:
        return resolve(host)
    except ConfigError:
        return []


def _split(endpoint: str) -> tuple[str, str]:
    return host_and_port(split_key(endpoint)[0])
