"""Threads are planned from the cores of the ranks; the allocator keeps memory if there is room and no user setting."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compute.resources import (
    ACTIVATION_BYTES,
    CpuAllocation,
    current_cpu_allocation,
    peak_resident_memory,
    recommended_thread_count,
    thread_warnings,
    tune_malloc,
)

BOTH, FOUR, EIGHT = (0, 1), (0, 1, 2, 3), tuple(range(8))


def seats(count, cores, threads=1, *, host="a", limit=None):
    return [CpuAllocation(host, cores, limit or len(cores), threads)] * count


@pytest.mark.parametrize(
    ("there", "planned"),
    [
        (seats(2, EIGHT), 4),  # torchrun and our agent: all ranks of a host may run on all its cores
        (seats(3, EIGHT), 2),
        (seats(1, FOUR), 4),
        (seats(4, BOTH), 1),
        ([CpuAllocation("a", BOTH, 2), CpuAllocation("a", (2, 3), 2)], 2),  # srun and mpirun: each on its own
        (seats(2, EIGHT) + seats(2, EIGHT, host="b"), 4),
        (seats(2, EIGHT, limit=4), 2),  # a container's quota
    ],
)
def test_cores_are_divided_among_those_who_share_them(there, planned):
    assert recommended_thread_count(there, 0) == planned


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (seats(2, BOTH, 2), "a: 2 ranks x 2 threads on 2 cores: more threads than cores .* Use --threads-per-rank 1$"),
        (seats(2, EIGHT, 8), "16|2 ranks x 8 threads on 8 cores: .* --threads-per-rank 4$"),
        (seats(4, BOTH, 1), "a: 4 ranks x 1 thread on 2 cores: the ranks take turns. Faster: 2 processes$"),
        (seats(4, BOTH, 2), "take turns. Faster: 2 processes and --threads-per-rank 1$"),
        (seats(2, EIGHT, 1), "a: 2 ranks x 1 thread on 8 cores: 6 cores are idle. Use --threads-per-rank 4$"),
        (seats(2, EIGHT, 4, limit=2), "on 2 cores: more threads"),
        (
            [CpuAllocation("a", (0,), 1, 2), CpuAllocation("a", (1,), 1, 2)],
            "2 ranks x 2 threads on 2 cores: more threads",
        ),
        (
            [CpuAllocation("a", (2,), 1, 1), CpuAllocation("a", (2,), 1, 1), CpuAllocation("a", (0, 1), 2, 2)],
            "a: 3 ranks x 2 threads on 3 cores: 2 of them are bound to 1 core and take turns. Bind them apart$",
        ),
        (seats(2, BOTH, 2) + seats(2, BOTH, 2, host="b") + seats(2, BOTH, 2, host="c"), "^a and 2 more hosts: "),
    ],
)
def test_a_wrong_number_is_told_in_one_line_with_the_right_one(there, words):
    (line,) = thread_warnings(there)
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "there", [seats(2, BOTH), seats(1, BOTH), seats(2, FOUR, 1), seats(1, EIGHT, 8), seats(3, EIGHT, 2)]
)
def test_a_number_that_fits_is_not_spoken_of(there):
    assert thread_warnings(there) == []


def test_a_gpu_rank_may_leave_cores_idle():
    assert thread_warnings(seats(1, EIGHT, 1), may_idle=True) == []
    assert thread_warnings(seats(2, BOTH, 2), may_idle=True) != []


@settings(max_examples=500)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.frozensets(st.integers(0, 7), min_size=1)), min_size=1, max_size=6))
def test_what_is_planned_is_never_complained_of_as_too_many_threads(places):
    there = [CpuAllocation(host, tuple(sorted(cores)), len(cores)) for host, cores in places]
    planned = [
        CpuAllocation(s.host, s.cores, s.limit, recommended_thread_count(there, rank)) for rank, s in enumerate(there)
    ]
    assert all(seat.threads >= 1 for seat in planned)
    assert not any("rank slower" in line for line in thread_warnings(planned))


def test_the_allocation_of_this_process():
    own = current_cpu_allocation(3)
    assert own.threads == 3 and 1 <= own.limit <= len(own.cores)


# ---- the allocator -------------------------------------------------------------------------------------------------


CHILD = """
import json, resource, sys
from paceline.compute.resources import tune_malloc, peak_resident_memory
why = tune_malloc(free_bytes=1 << 40, state_bytes=0) if sys.argv[1] == "tuned" else "asked to leave it"
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(6):
    if step == 2:
        before = faults()
    blocks = [b"x" * (32 << 20) for _ in range(3)]  # as activations come and go
    del blocks
print(json.dumps([why, faults() - before, peak_resident_memory()]))
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
    ("free", "state", "env", "words"),
    [
        (ACTIVATION_BYTES - 1, 0, {}, "MiB are free for this rank"),
        (ACTIVATION_BYTES + (10 << 30), 10 << 30, {}, "MiB are free for this rank"),
        (None, 0, {"MALLOC_ARENA_MAX": "2"}, "MALLOC_ARENA_MAX is set"),
        (None, 0, {"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "GLIBC_TUNABLES is set"),
        (None, 0, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "different allocator"),
    ],
)
def test_it_is_left_alone_without_room_or_where_it_is_the_users(free, state, env, words):
    """None of these reaches glibc: this very process stays as it is."""
    assert words in tune_malloc(free_bytes=free, state_bytes=state, env=env)


def test_the_peak_is_this_processs():
    assert 10 << 20 < peak_resident_memory() < 1 << 36
