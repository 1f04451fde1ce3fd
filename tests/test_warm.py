"""Forked interpreters are as good as started ones, and no process sees what another has done."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm

LOOKS = """
import json, os, random, sys, threading
import numpy
print(json.dumps([
    sys.argv, sys.path[0] in ("", os.getcwd()), __name__, sys.modules["__main__"].__dict__ is globals(), os.getcwd(),
    sorted(os.environ.items()), os.getpgid(0) == os.getsid(0), sys.stdin.read(), threading.active_count(), sys.path[1:],
    [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")],
]))
"""
SPOILS = """
import os, sys, numpy, torch
import paceline.errors as errors
assert not hasattr(errors, "spoilt") and torch.get_default_dtype() is torch.float32
errors.spoilt = 1
torch.set_default_dtype(torch.float64)
os.environ["SPOILT"] = "1"
os.chdir("/")
print(numpy.random.rand(), hash("a"), torch.rand(1).item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("torch", "mine"), [(False, False), (True, True)])
def test_a_forked_interpreter_sees_what_a_started_one_sees(tmp_path: Path, torch: bool, mine: bool) -> None:
    settings = {"cwd": tmp_path, "env": {**os.environ, "MINE": "7"}, "start_new_session": mine}
    words = ["-c", LOOKS, "one", "two words"]
    started = subprocess.run(
        [sys.executable, *words], **settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    forked = warm.run(words, torch=torch, **settings)
    assert (forked.returncode, forked.stderr) == (0, "")
    assert forked.stdout == started.stdout


@pytest.mark.slow
def test_nothing_that_one_does_is_seen_by_the_next_and_ranks_differ_in_their_hashes() -> None:
    said = [warm.run(["-c", SPOILS], rank=rank) for rank in (0, 0, 1)]
    assert [one.returncode for one in said] == [0, 0, 0], said
    random, hashes, torchs = zip(*(one.stdout.split() for one in said), strict=True)
    assert len(set(random)) == 3  # numpy takes its seed from the system
    assert hashes[0] == hashes[1] != hashes[2]
    assert len(set(torchs)) == 3


@pytest.mark.slow
def test_a_session_searches_what_was_frozen_before_a_fork_too() -> None:
    """Which it does not in a fork: there are the imports' objects alone."""
    import torch

    from paceline.sessions.containers import find_live_instances

    module = torch.nn.Linear(1, 1)
    gc.freeze()
    assert any(found is module for found in find_live_instances(torch.nn.Linear))
    assert gc.get_freeze_count() > 0
    done = warm.run(["-c", "import gc; print(gc.get_freeze_count())"])
    assert done.stdout == "0\n"
