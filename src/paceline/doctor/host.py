"""The program on each host: `python -P -m paceline.doctor.host` answers requests until its stdin ends.

One JSON line in, one out. Whoever can write to our stdin has logged in as this user; from the network comes nothing
but bytes that are counted.
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
from paceline.doctor.rehearse import rehearse
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
            return m.Listening(network.listen(request.token))
        case m.FreePort():
            return m.Listening(network.free_port())
        case m.Connect():
            return network.connect(request.targets, request.seconds)
        case m.Measure():
            return network.measure(request.target, request.seconds)
        case m.WriteProbe():
            return files.write_probe(request.folder, request.token)
        case m.ReadProbe():
            return files.read_probe(request.folder, request.token)
        case m.RemoveProbe():
            return files.remove_probe(request.folder, request.token)
        case m.AskDisk():
            return files.disk(request.folder)
        case m.Fingerprint():
            return files.fingerprint(request.folder)
        case m.Rehearse():
            return rehearse(request)


def main() -> int:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; then our stdin ends
    decoder = msgspec.json.Decoder(m.Request)
    while line := sys.stdin.buffer.readline(m.MAX_LINE_BYTES + 1):
        try:
            reply = answer(decoder.decode(m.bounded(line)))
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            reply = m.Refused(str(error)[:1000])
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            break
    os._exit(0)  # threads still wait for visitors


if __name__ == "__main__":
    main()
