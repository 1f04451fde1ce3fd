"""The allocator: memory of one step is there for the next, where there is room; and left alone where it is not ours."""

import json
import os
import subprocess
import sys

import pytest

from paceline.compute.resources import keep_memory, peak_memory, room_needed

ENOUGH = room_needed(0)
CHILD = """
import json, resource, sys
from paceline.compute.resources import keep_memory, peak_memory
why = keep_memory(free_bytes=1 << 40, state_bytes=0) if sys.argv[1] == "tuned" else "asked to leave it"
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(6):
    if step == 2:
        before = faults()
    blocks = [b"x" * (32 << 20) for _ in range(3)]  # as activations come and go
    del blocks
print(json.dumps([why, faults() - before, peak_memory()]))
"""


def test_the_kernel_gives_each_page_once_and_not_in_every_step():
    found = {}
    for how in ("system", "tuned"):
        # a user's own settings would be left alone
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        run = subprocess.run([sys.executable, "-c", CHILD, how], env=env, capture_output=True, text=True, check=True)
        found[how] = json.loads(run.stdout)
    assert found["tuned"][0] == ""
    assert found["tuned"][1] < found["system"][1] / 20
    assert found["tuned"][2] < 1.5 * found["system"][2]  # the same blocks again, not new ones beside them


@pytest.mark.parametrize(
    ("free", "env", "words"),
    [
        (ENOUGH - 1, {}, "MiB are free for this rank"),
        (None, {"MALLOC_ARENA_MAX": "2"}, "MALLOC_ARENA_MAX is set"),
        (None, {"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "GLIBC_TUNABLES is set"),
        (None, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "another allocator"),
    ],
)
def test_it_is_left_alone_without_room_or_where_it_is_the_users(free, env, words):
    """None of these reaches glibc: this very process stays as it is."""
    assert words in keep_memory(free_bytes=free, state_bytes=0, env=env)


def test_more_state_needs_more_room():
    assert room_needed(10 << 30) - room_needed(0) >= 10 << 30


def test_the_peak_is_this_processs():
    assert 10 << 20 < peak_memory() < 1 << 36
