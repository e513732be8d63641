"""Choose the network interface that gloo uses between machines."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import psutil


def choose_network(addresses: Sequence[str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that other machines are reached by, unless the user has set it.

    By default gloo takes the address that the machine's own name resolves to, which is 127.0.1.1 on many, and waits
    there for the others in vain. addresses: of the other machines' ranks, as they reach rank 0; "" if unknown.
    Where no interface is found gloo's choice stays.
    """
    remote = next((address for address in addresses if not is_local(address)), None)
    if "GLOO_SOCKET_IFNAME" in os.environ or remote is None:
        return
    with suppress(OSError):
        own = address_towards(remote)
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == own for entry in entries):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def is_local(address: str) -> bool:
    """Whether an IP address is reachable only from its own machine."""
    return not address or ipaddress.ip_address(address).is_loopback


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`; sends nothing. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect((host, 9))
        return str(outward.getsockname()[0])
