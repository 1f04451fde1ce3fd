"""TCP connections whose packets are signed (RFC 2385): the kernel drops what comes from whoever has not the key."""

import socket
import struct
from contextlib import suppress

TCP_MD5SIG_EXT, WITH_PREFIX, KEY_BYTES = 32, 1, 80  # Linux: linux/tcp.h


def sign(one: socket.socket, key: bytes) -> bool:
    """Have every packet to and from anywhere signed with this key; False where the kernel cannot."""
    address = struct.pack("=H", one.family).ljust(128, b"\0")  # with a prefix of 0 bits: all of them
    option = address + struct.pack("=BBHi", WITH_PREFIX, 0, len(key), 0) + key.ljust(KEY_BYTES, b"\0")
    with suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT, option)
        return True
    return False
