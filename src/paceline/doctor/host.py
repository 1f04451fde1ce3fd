"""The program on each host: `python -P -m paceline.doctor.host` answers requests until its stdin ends.

One JSON line in, one out. Whoever can write to our stdin has logged in as this user; from the network come only bytes
that are counted.
"""

import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

import paceline
from paceline.contract.birth import WorkerBirth
from paceline.doctor import messages as m
from paceline.doctor import network
from paceline.host.facts import gather, resolve

MAX_NAMES = 4096
PACKAGED_DATA = Path(paceline.__file__).parent / "datasets" / "mnist"
IDX_FILE = re.compile(r"(images|labels)-idx\d-ubyte(\.gz)?$")
MAX_FILES = 64
TOKEN = re.compile(r"[0-9a-f]{32}")
WORKER = "paceline.proofs.rehearsal"
STDIN = 0
MAX_OUTPUT_BYTES = 1 << 16


def probe(request: m.Probe) -> m.Done:
    """Write, look for or remove the file that only this doctor knows."""
    if not TOKEN.fullmatch(request.token):  # it becomes a file's name
        raise ValueError(f"a token is 32 hex digits, got {request.token[:40]!r}")
    folder = existing(request.folder)
    path, token = folder / f".paceline-doctor-{request.token}", request.token.encode()
    if request.act == "write":
        try:
            _write_whole(path, token)
        except OSError as error:
            return m.Done(False, f"{folder} cannot be written to: {error.strerror}")
    elif request.act == "read":
        try:
            os.scandir(folder).close()  # makes NFS look again
            if path.read_bytes()[:64] != token:
                return m.Done(False, "it has another content here")
        except OSError as error:
            return m.Done(False, error.strerror or str(error))
    else:
        with suppress(OSError):
            path.unlink()
    return m.Done(True)


def _write_whole(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)  # a full disk may only say so now
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def disk(folder: str) -> m.Disk:
    """Room at the folder, or at the parent that it will be made in."""
    path = existing(folder)
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return m.Disk(str(path), 0, 0, error.strerror or str(error))
    return m.Disk(str(path), usage.free, usage.total)


def hash_data(folder: str) -> m.Files:
    """Sizes and SHA-256 of the IDX files in `folder`, by name; of the packaged ones if it is empty."""
    root = Path(folder) if folder else PACKAGED_DATA
    try:
        paths = sorted(path for path in root.iterdir() if IDX_FILE.search(path.name))[:MAX_FILES]
        return m.Files(tuple(m.File(path.name, path.stat().st_size, _sha256(path)) for path in paths))
    except OSError as error:
        return m.Files((), f"{root}: {error.strerror}")


def existing(folder: str) -> Path:
    """The folder, or its nearest parent that is there."""
    path = Path(folder).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rehearse(request: m.Rehearse) -> m.Rehearsed:
    """What rank 0 measured, if it is one of this host's; returns when all of this host's ranks have ended.

    They are killed when the time is up, one of them fails, or the launcher is gone.
    """
    if request.cwd and not Path(request.cwd).is_dir():
        return m.Rehearsed(why=f"the working folder {request.cwd} does not exist here")
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would fill
        try:
            for local_rank in range(request.workers):
                ranks.append(_start(request, local_rank, errors.fileno()))
            if why := _wait(ranks, request.seconds):
                return m.Rehearsed(why=f"{why}: {_last_line(errors)}".removesuffix(": "))
            assert ranks[0].stdout is not None
            return msgspec.json.decode(ranks[0].stdout.read(MAX_OUTPUT_BYTES), type=m.Rehearsed)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                assert rank.stdout is not None
                rank.stdout.close()


def _start(request: m.Rehearse, local_rank: int, errors: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(request.first_rank + local_rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(request.workers),
        "MASTER_ADDR": request.address,
        "MASTER_PORT": str(request.port),
        "OMP_NUM_THREADS": str(request.threads),
        "PYTHONUNBUFFERED": "1",  # as agents start ranks: what it has printed comes before what has ended it
        **WorkerBirth(agent_pid=os.getpid()).variable(),  # it dies with us
    }
    if request.interface:
        env |= {"GLOO_SOCKET_IFNAME": request.interface, "NCCL_SOCKET_IFNAME": request.interface}
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", WORKER),
        env=env,
        cwd=request.cwd or None,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(request))
    process.stdin.close()
    return process


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
    """Wait for all to end well; why not, otherwise. Nothing else can come on stdin meanwhile but its end."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        for code in codes:
            if code:
                return f"a rank was killed by signal {-code}" if code < 0 else f"a rank ended with exit code {code}"
        if None not in codes:
            return ""
        if time.monotonic() > deadline:
            return f"the rehearsal has not ended within {seconds:.0f} s"
        if select.select([STDIN], [], [], 0.05)[0]:
            return "the launcher is gone"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


ANSWERS: Mapping[type[m.Request], Callable[[Any], object]] = {
    m.AskFacts: lambda _: gather(),
    m.AskTime: lambda _: m.Time(time.time()),
    m.Resolve: lambda one: m.Resolved({name: resolve(name) for name in one.names[:MAX_NAMES]}),
    m.Listen: lambda one: m.Listening(network.listen_for_peers(one.token)),
    m.FreePort: lambda _: m.Listening(network.free_port()),
    m.Connect: lambda one: network.try_targets(one.targets, one.seconds),
    m.MeasureLink: lambda one: network.measure_link(one.target, one.seconds),
    m.Probe: probe,
    m.AskDisk: lambda one: disk(one.folder),
    m.HashData: lambda one: hash_data(one.folder),
    m.Rehearse: rehearse,
}


def main() -> int:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; then our stdin ends
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
    os._exit(0)  # threads are still waiting for visitors


if __name__ == "__main__":
    main()
