"""The address under which the ranks of other hosts reach this host.

It is the address from which this host reaches the meeting point of all ranks. The host's own name is not used: it often does
not resolve, or resolves to 127.0.1.1.
"""

import socket

import psutil
import torch.distributed as dist

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.world.launch import chosen_interface

LOOPBACK = "127.0.0.1"
SOMEWHERE = "192.0.2.1"   # an address that belongs to nobody (RFC 5737)


def own_address(store: dist.Store) -> str:
    """The address from which this host reaches the host of `store`; on that host itself, the one from which it reaches the network.

    The interface that GLOO_SOCKET_IFNAME names takes precedence. A store inside this process needs no network.
    raises: ConfigError when there is no such interface, or the host of the store has a name that does not resolve
    """
    if interface := chosen_interface():
        return address_of(interface)
    meeting_point = store_host(store)
    if meeting_point is None:
        return LOOPBACK
    own = address_towards(meeting_point)
    if own is None:
        raise ConfigError(f"the meeting point {meeting_point!r} is not reachable from this host: its name does not resolve, or no "
                          "interface leads there; set MASTER_ADDR to an address of the first host")
    return (address_towards(SOMEWHERE) or own) if is_loopback(own) and not is_loopback(meeting_point) else own


def store_host(store: dist.Store) -> str | None:
    """The host of a TCP store, None for other stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def address_towards(host: str) -> str | None:
    """The address of this host from which it would send to `host`; None if it cannot. Nothing is sent."""
    try:
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0]
    except OSError:   # no such name or no route: the caller decides what that means
        return None
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, or a usual name of one."""
    return host in ("localhost", "::1") or host.startswith("127.")


def address_of(interface: str) -> str:
    """The first address of a network interface. raises: ConfigError when it has none, or does not exist"""
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ConfigError(f"GLOO_SOCKET_IFNAME = {interface!r}: this host has no such interface. {did_you_mean(interface, interfaces)}")
    for family in (socket.AF_INET, socket.AF_INET6):
        if found := [entry.address for entry in interfaces[interface] if entry.family == family]:
            return found[0]
    raise ConfigError(f"GLOO_SOCKET_IFNAME = {interface!r}: this interface has no address")
