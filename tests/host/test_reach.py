"""Why a connection fails, told apart on real sockets and in a network of our own that leads nowhere."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendered import rendered

from paceline.host.tcp import is_loopback, resolve_addresses, why_unreachable

UNKNOWN = "no-such-host.invalid"


@pytest.fixture
def listener() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_who_listens_is_reached(listener: int) -> None:
    assert why_unreachable("127.0.0.1", listener) == ""
    assert why_unreachable("localhost", listener) == ""


def test_a_port_that_nobody_listens_on_is_refused_and_loopback_is_named() -> None:
    with closing(socket.socket()) as bound:  # bound, not listening: nobody else gets the port meanwhile
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        said, by_name = why_unreachable("127.0.0.1", port), why_unreachable("localhost", port)
    assert f"localhost:{port} (127.0.0.1): " in by_name
    rendered(said.replace(str(port), "PORT"))


def test_silence_is_told_apart_within_the_time_given() -> None:
    with closing(socket.socket()) as full:  # a listener whose queue is full drops what comes, as a firewall does
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))):
            start = time.monotonic()
            said = why_unreachable("127.0.0.1", port, 0.3)
    rendered(said.replace(str(port), "PORT"))
    assert 0.25 < time.monotonic() - start < 20.0  # not the minutes of the kernel


@pytest.mark.parametrize(
    "name", ["", " ", "a\nb", "a\0b", "-oProxyCommand=x", "n" * 64, "x" * 5000, "\udcff", "n1..", "é" * 80]
)
def test_a_hostile_name_is_an_unknown_one(name: str) -> None:
    host, _, unknown = why_unreachable(UNKNOWN, 80).partition(": ")
    said = why_unreachable(name, 80)
    assert host == UNKNOWN
    assert said.endswith(unknown) and said.isprintable() and len(said) < 400
    assert resolve_addresses([name]) == []


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_a_number_that_is_no_port_is_said(port: int) -> None:
    assert "ports are 1..65535" in why_unreachable("127.0.0.1", port)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30).filter(lambda name: not any(c.isalnum() for c in name)))
def test_no_name_raises(name: str) -> None:
    assert isinstance(why_unreachable(name, 1, 0.01), str)


def test_addresses_come_in_order_and_none_twice() -> None:
    found = resolve_addresses(["127.0.0.2", UNKNOWN, "127.0.0.1", "localhost", "::ffff:127.0.0.2"])
    assert found[:2] == [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET, "127.0.0.1")]
    assert len(found) == len(set(found)) and all(is_loopback(address) for _, address in found)
    assert not is_loopback("10.0.0.1") and not is_loopback("n1") and is_loopback("::1")


NETWORK = """
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.99.0.1/24 dev v0; ip link set v0 up; ip link set v1 up
nft 'add table ip t; add chain ip t out { type filter hook output priority 0; }'
nft 'add rule ip t out ip daddr 10.99.0.7 drop'
nft 'add rule ip t out ip daddr 10.99.0.8 reject with icmp type host-unreachable'
ip route add prohibit 10.99.1.0/24
exec "$@"
"""
ASKS = """
import sys
from paceline.host.tcp import why_unreachable
for address in sys.argv[1:]:
    print(why_unreachable(address, 9, 0.5))
"""


@pytest.mark.root
@pytest.mark.needs("ip", "nft", "unshare")
def test_no_route_a_firewall_and_a_machine_that_is_off_are_told_apart() -> None:
    asked = ["192.0.2.1", "10.99.0.7", "10.99.0.8", "10.99.0.9", "10.99.1.1"]
    run = subprocess.run(
        ["unshare", "--net", "bash", "-ec", NETWORK, "bash", sys.executable, "-c", ASKS, *asked],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 0, run.stderr
    rendered(run.stdout.splitlines())
