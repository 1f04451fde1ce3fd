"""Types commands for the soak: has imported everything once, and forks for each, so that ten thousand take minutes.

A line on stdin is a JSON list, the words of a command; the answer is a line with its exit code, seconds, the memory
that it needed beyond this process's own, and what it printed: all of it, and its standard error alone.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time

from paceline.cli import COMMANDS, main

LIMIT_SECONDS = 20
SHOWN_CHARS = 3000


def serve(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer(words: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        child = os.fork()
        if child == 0:
            run(words, out.fileno(), err.fileno())
        deadline = began + LIMIT_SECONDS
        while True:
            pid, status, used = os.wait4(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        seconds = time.monotonic() - began
        texts: list[str] = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 24).decode(errors="replace"))
    text = "".join(texts)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "grown_bytes": max(0, used.ru_maxrss - before) * 1024,
        "escapes": "\x1b" in text or "\x9b" in text,
        "traceback": "Traceback (most recent call last)" in text,
        "text": shortened(text),
        "stderr": shortened(texts[1]),
    }


def shortened(text: str) -> str:
    return text if len(text) < 2 * SHOWN_CHARS else text[:SHOWN_CHARS] + " ... " + text[-SHOWN_CHARS:]


def run(words: list[str], out: int, err: int) -> None:
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    code = 70
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:] or [f"paceline.cli.{one.settings.partition('.')[0]}" for one in COMMANDS.values()])
