"""The machines that the user means: `n1,n2:2222`, or a file with one `name[:port] [slots=N]` on each line."""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError
from paceline.protocol.job import Host, plain_name
from paceline.runs.reading import read

MAX_FILE_BYTES = 1 << 20
MAX_SLOTS = 1024

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # no leading '-': ssh would take it for an option
_ADDRESS = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>\[[^\[\]]*\]|[^:\[\]@]*)(?::(?P<port>.*))?", re.DOTALL)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts TEXT`, node 0 first; a name is user@name, name or an address, IPv6 in brackets.

    A file is meant when TEXT has a `/` or ends in `.txt`: a file of the working folder must not take a host's place.

    Raises:
        UsageError: every mistake at once, each with its line.
    """
    path = Path(text)
    is_file = "/" in text or text.endswith(".txt")
    listed = ((f"host {index}", item.split() or [""]) for index, item in enumerate(text.split(","), start=1))
    hosts: list[Host] = []
    wrong: list[str] = []
    seen: dict[tuple[str, int | None], str] = {}
    for place, words in _file_entries(path) if is_file else listed:
        try:
            host = _host(words)
        except ValueError as error:
            wrong.append(f"{place}: {error}")
            continue
        key = (plain_name(host).lower(), host.port)
        if key in seen:
            wrong.append(f"{place}: {words[0]} is already there ({seen[key]}); more workers: slots=N or --nproc")
        seen.setdefault(key, place)
        hosts.append(host)
    if wrong:
        asked = f"the hosts file {text}" if is_file else f"--hosts {text}"
        raise UsageError(code="hosts-wrong", value=asked, wrong="\n  ".join(wrong))
    if not hosts:
        raise UsageError(code="no-host", value=text)
    return tuple(hosts)


def _file_entries(path: Path) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = read(path.resolve(), limit_bytes=MAX_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(code="hosts-unreadable", path=path, reason=reason) from error
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            yield f"line {number}", words


def _host(words: list[str]) -> Host:
    """The host that one line describes; ValueError says what is wrong with it."""
    address, *options = words
    slots: int | None = None
    for option in options:
        name, _, value = option.partition("=")
        if name != "slots":
            raise ValueError(f"unknown option {option!r} of {address}. There is only slots=N, and one host a line")
        if slots is not None:
            raise ValueError(f"slots= twice for {address}")
        slots = _number("slots", value, MAX_SLOTS)
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is not a host: write name, name:port, user@name, or [IPv6]:port")
    user, name, port = found["user"], found["name"], found["port"]
    if user is not None and not _USER.fullmatch(user):
        raise ValueError(f"{user!r} in {address!r} is not a user's name")
    if not _is_ipv6(name) and not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', a letter or digit first; or an address, IPv6 in brackets"
        raise ValueError(f"{name!r} is not a host's name ({allowed})")
    at_user = f"{user}@" if user is not None else ""
    return Host(at_user + name, None if port is None else _number("port", port, 65535), slots)


def _is_ipv6(name: str) -> bool:
    if not (name.startswith("[") and name.endswith("]")):
        return False
    try:
        ipaddress.IPv6Address(name[1:-1])
    except ValueError:
        return False
    return True


def _number(name: str, text: str, largest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= largest:
        raise ValueError(f"{name} must be a number from 1 to {largest}, got {text!r}")
    return int(text)
