"""The facts are true, and fast to gather_facts."""

import os
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

from paceline.host.facts import SOURCE_ROOT, ResourceLimit, gather_facts, resolve_host, source_digest

CODE = """
import sys, time
start = time.perf_counter()
from paceline.host.facts import gather_facts
facts = gather_facts()
print(time.perf_counter() - start, "torch" in sys.modules)
"""


def test_they_are_of_this_machine_and_process() -> None:
    facts = gather_facts()
    assert (facts.host, facts.pid) == (os.uname().nodename, os.getpid())
    assert facts.packages["torch"] == version("torch")
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.cores <= len(os.sched_getaffinity(0))
    assert facts.memory == psutil.virtual_memory().total
    assert facts.shm_size == shutil.disk_usage("/dev/shm").total
    assert facts.nofile == ResourceLimit(*resource.getrlimit(resource.RLIMIT_NOFILE))
    assert not any(one.address.startswith(("127.", "fe80")) or one.address == "::1" for one in facts.addresses)
    assert abs(facts.wall_seconds - time.time()) < 60


def test_they_are_gathered_at_once_and_without_torch() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True, timeout=90)
    seconds, torch = done.stdout.split()
    assert torch == "False"
    assert float(seconds) < 10  # 0.1 on a machine that does nothing else


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    first = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no code\n")
    assert source_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = source_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, changed, source_digest(tmp_path)}) == 3
    assert (SOURCE_ROOT / "host" / "facts.py").is_file()


def test_a_name_is_resolved_in_bounded_time() -> None:
    assert resolve_host("localhost")[0] in ("127.0.0.1", "::1")
    assert resolve_host("127.0.0.1") == ("127.0.0.1",)
    assert resolve_host("::ffff:127.0.0.1") == ("127.0.0.1",)
    assert resolve_host("x" * 300) == ()
    start = time.monotonic()
    assert resolve_host("nonsense.invalid", seconds=0.5) == ()
    assert time.monotonic() - start < 1.5
