"""Which address of this host the others are told. Nothing is sent anywhere."""

import socket

import pytest
import torch.distributed as dist

from rankloom.base.errors import ConfigError
from rankloom.world.transport import address
from rankloom.world.transport.address import own_address


class StoreAt(dist.Store):
    """A store that says it is on a host."""

    def __init__(self, host):
        super().__init__()
        self.host = host


@pytest.fixture
def network(monkeypatch):
    """`network({host: own address})`: what this host's address would be towards each; others cannot be reached."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return lambda towards: monkeypatch.setattr(address, "address_towards", towards.get)


def test_a_store_in_this_process_needs_no_network(network):
    assert own_address(dist.PrefixStore("a", dist.HashStore())) == "127.0.0.1"


def test_the_address_is_the_one_that_reaches_the_store_whatever_prefixes_it_has(network):
    network({"first": "10.0.0.7"})
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", StoreAt("first")))) == "10.0.0.7"


def test_a_host_that_knows_its_own_name_as_loopback_takes_the_address_towards_the_world(network):
    """As Debian has it: the store's host finds its own name at 127.0.1.1, where no other host would find it."""
    network({"first": "127.0.0.1", address.SOMEWHERE: "10.0.0.1"})
    assert own_address(StoreAt("first")) == "10.0.0.1"
    network({"first": "127.0.0.1"})
    assert own_address(StoreAt("first")) == "127.0.0.1", "a host that is connected to nothing"


@pytest.mark.parametrize("store", ["localhost", "127.0.0.1"])
def test_a_store_that_all_know_as_loopback_keeps_them_on_this_machine(network, store):
    assert own_address(StoreAt(store)) in ("127.0.0.1", "::1")


def test_a_name_that_does_not_resolve_is_named(network):
    network({})
    with pytest.raises(ConfigError, match="'nowhere' is not reachable from this host: its name does not resolve.*MASTER_ADDR"):
        own_address(StoreAt("nowhere"))


def test_an_unreachable_name_has_no_address():
    assert address.address_towards("no-such-host.invalid") is None


def test_the_chosen_interface_goes_before(network, monkeypatch):
    network({"first": "10.0.0.7"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert own_address(StoreAt("first")) == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named_with_the_nearest_that_is(network, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME = 'lo0': this host has no such interface. Did you mean 'lo'"):
        own_address(dist.HashStore())


def test_an_interface_without_an_address_is_refused(monkeypatch):
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"ib0": []})
    with pytest.raises(ConfigError, match="ib0.*has no address"):
        address.address_of("ib0")


def test_ipv6_is_taken_where_there_is_nothing_else(monkeypatch):
    entry = type("Entry", (), {"family": socket.AF_INET6, "address": "fd00::2"})
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: {"eth0": [entry]})
    assert address.address_of("eth0") == "fd00::2"
