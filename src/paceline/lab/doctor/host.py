"""The program on each host: `python -P -m paceline.lab.doctor.host` answers requests until its stdin ends.

One JSON line in, one out. Who can write to its stdin has logged in as this user. From the network it only counts bytes.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.host.facts import gather
from paceline.lab.doctor import messages as m
from paceline.lab.doctor import network

TOKEN = re.compile(r"[0-9a-f]{32}")


def examine(request: m.Examine) -> m.Examined:
    """What this host is; from now on it listens."""
    folder = existing(request.folder)
    usage = shutil.disk_usage(folder)
    return m.Examined(gather(), network.listen_for_peers(request.token), str(folder), usage.free, usage.total)


def probe(request: m.Probe) -> m.Done:
    """Write, look for or remove the file that only this doctor knows."""
    if not TOKEN.fullmatch(request.token):  # it becomes a file's name
        raise ValueError(f"a token is 32 hex digits, got {request.token[:40]!r}")
    folder = existing(request.folder)
    path, token = folder / f".paceline-doctor-{request.token}", request.token.encode()
    if request.act == "write":
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())  # a full disk may only fail now
        except OSError as error:
            if not isinstance(error, FileExistsError):
                path.unlink(missing_ok=True)
            return m.Done(f"{folder} cannot be written to: {error.strerror}")
    elif request.act == "read":
        try:
            os.scandir(folder).close()  # makes NFS look again
            if path.read_bytes()[:64] != token:
                return m.Done("it has another content here")
        except OSError as error:
            return m.Done(error.strerror or str(error))
    else:
        with suppress(OSError):
            path.unlink()
    return m.Done()


def existing(folder: str) -> Path:
    """The folder, or its nearest parent that exists."""
    path = Path(folder).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


ANSWERS: Mapping[type[m.Request], Callable[[Any], object]] = {
    m.Examine: examine,
    m.AskTime: lambda _: m.Time(time.time()),
    m.Connect: lambda one: network.try_targets(one.targets, one.seconds, one.measure_seconds),
    m.Probe: probe,
}


def main() -> int:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher; then this stdin ends
    decoder = msgspec.json.Decoder(m.Request)
    while line := sys.stdin.buffer.readline(m.MAX_LINE_BYTES + 1):
        try:
            if len(line) > m.MAX_LINE_BYTES or not line.endswith(b"\n"):
                raise ValueError(f"a line of more than {m.MAX_LINE_BYTES} bytes, or cut off: {line[:60]!r}")
            request = decoder.decode(line)
            reply = ANSWERS[type(request)](request)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            reply = m.Refused(str(error)[:1000])
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    os._exit(0)  # threads still wait for connections


if __name__ == "__main__":
    main()
