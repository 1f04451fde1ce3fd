"""TCP connections to other machines: connection tests with the reason of a failure, and signed packets."""

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from contextlib import closing, suppress

PROBE_SECONDS = 2.0
MAX_NAME_CHARS = 253  # the limit of DNS
TCP_MD5SIG_EXT, WITH_PREFIX, KEY_BYTES = 32, 1, 80  # linux/tcp.h

_NAME = "this node knows no address of that name (see /etc/hosts and DNS)"
_REFUSED = "refused: nothing listens on that port. Is node 0 started?"
_NO_ROUTE = "no route from this node to that network. Do both have an interface in the same network?"
_NO_HOST = "no way to that node: it is off, not in this network, or a firewall rejects the connection"
_LOCAL = " ({} is the local machine; other nodes need an address that all of them can use)"
_FORBIDDEN = "not permitted: a firewall on this node forbids the connection"
_REASONS = {
    errno.ECONNREFUSED: _REFUSED,
    **dict.fromkeys((errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT), _NO_ROUTE),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.EHOSTDOWN), _NO_HOST),
    **dict.fromkeys((errno.EPERM, errno.EACCES), _FORBIDDEN),
}


def why_unreachable(host: str, port: int, timeout_seconds: float = PROBE_SECONDS) -> str:
    """Why a TCP connection to `host`:`port` fails, with the resolved address; empty if one succeeds.

    All addresses of `host` together get `timeout_seconds`. The name resolution takes additional time (up to about 10 s
    if a DNS server does not answer).
    """
    shown = host if host.isprintable() and host.strip() == host != "" else repr(host)
    if len(shown) > MAX_NAME_CHARS:
        shown = f"{shown[:40]}..."
    if not 0 < port < 1 << 16:
        return f"{shown}:{port}: ports are 1..65535"
    addresses = resolve_addresses([host])
    if not addresses:
        return f"{shown}: {_NAME}"
    reasons: list[str] = []
    for family, address in addresses:
        reason = _refusal(family, address, port, timeout_seconds / len(addresses))
        if not reason:
            return ""
        target = f"{shown}:{port}" if address == host else f"{shown}:{port} ({address})"
        reasons.append(f"{target}: {reason}{_LOCAL.format(address) if is_loopback(address) else ''}")
    return "; ".join(reasons)


def resolve_addresses(names: Iterable[str]) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of these names or addresses, best first and each once, without names that do not resolve."""
    unique: dict[tuple[socket.AddressFamily, str], None] = {}
    for name in names:
        if not name or len(name) > MAX_NAME_CHARS:
            continue
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # ValueError: not a valid name
            continue
        for family, _, _, _, address in answers:
            if family in (socket.AF_INET, socket.AF_INET6):
                unique[_plain(family, str(address[0]))] = None
    return list(unique)


def is_loopback(address: str) -> bool:
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        return parsed.is_loopback or parsed.is_unspecified
    return False


def _plain(family: socket.AddressFamily, address: str) -> tuple[socket.AddressFamily, str]:
    # ::ffff:10.0.0.1 is 10.0.0.1 in the notation of IPv6, not a second address
    if family == socket.AF_INET6 and (mapped := ipaddress.IPv6Address(address.partition("%")[0]).ipv4_mapped):
        return socket.AF_INET, str(mapped)
    return family, address


def _refusal(family: socket.AddressFamily, address: str, port: int, timeout_seconds: float) -> str:
    try:
        with closing(socket.socket(family, socket.SOCK_STREAM)) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect((address, port))
            # Linux may connect a loopback socket to itself, if its local port happens to be `port`
            return _REFUSED if connection.getsockname()[:2] == connection.getpeername()[:2] else ""
    except TimeoutError:
        return f"no answer within {timeout_seconds:.2g} s: filtered by a firewall, or the node is off"
    except OSError as error:
        return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def set_tcp_md5_key(connection: socket.socket, key: bytes) -> bool:
    """Have the kernel drop packets of this socket without this signature (RFC 2385); False if it cannot."""
    address = struct.pack("=H", connection.family).ljust(128, b"\0")  # with a prefix of 0 bits: all addresses
    option = address + struct.pack("=BBHi", WITH_PREFIX, 0, len(key), 0) + key.ljust(KEY_BYTES, b"\0")
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, option)
        return True
    return False
