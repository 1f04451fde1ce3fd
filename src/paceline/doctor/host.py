"""The program on each host: `python -P -m paceline.doctor.host` answers requests until its stdin ends.

One JSON line in, one out. Whoever can write to our stdin has logged in as this user; from the network come only bytes
that are counted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import msgspec

from paceline.doctor import files, network
from paceline.doctor import messages as m
from paceline.doctor.rehearse import rehearse_here
from paceline.host.facts import gather, resolve

MAX_NAMES = 4096


def answer(request: m.Request) -> Any:
    """The answer to a request."""
    match request:
        case m.AskFacts():
            return gather()
        case m.AskTime():
            return m.Time(time.time())
        case m.Resolve():
            return m.Resolved({name: resolve(name) for name in request.names[:MAX_NAMES]})
        case m.Listen():
            return m.Listening(network.listen_for_peers(request.token))
        case m.FreePort():
            return m.Listening(network.free_port())
        case m.Connect():
            return network.try_targets(request.targets, request.seconds)
        case m.MeasureLink():
            return network.measure_link(request.target, request.seconds)
        case m.Probe():
            return files.probe(request)
        case m.AskDisk():
            return files.disk(request.folder)
        case m.HashData():
            return files.hash_data(request.folder)
        case m.Rehearse():
            return rehearse_here(request)


def _bounded(line: bytes) -> bytes:
    if len(line) > m.MAX_LINE_BYTES or not line.endswith(b"\n"):
        raise ValueError(f"a line of more than {m.MAX_LINE_BYTES} bytes, or cut off: {line[:60]!r}")
    return line


def main() -> int:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; then our stdin ends
    decoder = msgspec.json.Decoder(m.Request)
    while line := sys.stdin.buffer.readline(m.MAX_LINE_BYTES + 1):
        try:
            reply = answer(decoder.decode(_bounded(line)))
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            reply = m.Refused(str(error)[:1000])
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    os._exit(0)  # threads are still waiting for visitors


if __name__ == "__main__":
    main()
