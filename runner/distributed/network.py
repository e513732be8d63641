"""Which of its networks a machine uses for gloo, where the processes of a run are on several machines."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress

import torch.distributed as dist

from runner.distributed.ranks import Ranks

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def choose_network(store: dist.Store, ranks: Ranks, address: str) -> None:
    """Name to gloo the interface that other machines are reached by, unless the user did so.

    Gloo else takes the address that the machine's own name stands for, which is 127.0.1.1 on many, and waits there for
    others in vain. address: of this process as the store is reached from it, "" where that is not known. All ranks call
    this. Where nothing is found, or everybody is on one machine, gloo's choice stays.
    """
    if ranks.local_size == ranks.size:
        return
    store.set(f"address {ranks.rank}", address)
    everyone = [each.decode() for each in store.multi_get([f"address {rank}" for rank in range(ranks.size)])]
    others = [each for each in everyone if not _here_only(each)]
    if "GLOO_SOCKET_IFNAME" in os.environ or not others:
        return
    with suppress(OSError):
        own = _address_towards(others[0]) if _here_only(address) else address
        if (name := _interface(own)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _here_only(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def _address_towards(other: str) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))
        return str(towards.getsockname()[0])


def _interface(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
