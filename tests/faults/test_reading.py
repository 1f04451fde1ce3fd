"""Whom does a text blame? Real pages of both launchers, and what only looks like one."""

import pytest
from benchmarks.faults.fault import Fate
from benchmarks.faults.reading import Said, said_by_paceline, said_by_torchrun

from paceline.protocol.evidence import Diagnosis, StopKind

STALL = """STALL after 5.6 s (world 3). CAUSE: rank 1 (vm, pid 5959)
  rank 1 did not enter all_reduce #15 [6922] float32; it is in sleeps at strikes.py:171, state S
  ranks 0, 2 wait in it, called from program.py:103"""
TIE = """RANKS DISAGREE: rank 0 against rank 1 (world 2); one of them is wrong
  rank 0 called all_reduce #16 [5] float32 at program.py:152 in reduce_totals"""
ROOT_CAUSE = """Failures:
[1]:
  rank      : 2 (local_rank: 2)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_14:56:48
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 31514)"""


def lines(text: str) -> list[tuple[float, str]]:
    return [(float(at), line) for at, line in enumerate(text.split("\n"))]


def paceline(text: str, code: int | None = 1, diagnosis: Diagnosis | None = None, pattern: str = "") -> Said:
    return said_by_paceline(lines(text), code, diagnosis, pattern)


@pytest.mark.parametrize(
    ("text", "code", "end", "named"),
    [
        (STALL, 3, Fate.BEHIND, (1,)),
        ("MISMATCH at step 7 (world 3). CAUSE: ranks 1, 2 (vm, pids 4, 5)", 4, Fate.MISMATCH, (1, 2)),
        ("NETWORK after 5.1 s (world 4). No rank identified as the cause", 3, Fate.NETWORK, ()),
        ("rank 1 (vm, pid 31585) failed: killed by SIGKILL", 137, Fate.DIED, (1,)),
        ("ranks 0, 2 (a, b) failed: exit code 1", 1, Fate.DIED, (0, 2)),
        ("all 3 ranks (vm) failed: exit code 1", 1, Fate.DIED, (0, 1, 2)),
        ("rank 1 (vm, pid 4) had already ended, with code 0, while others ran\nso the others lost it:\n"
         "rank 2 (vm, pid 5) failed: exit code 1", 1, Fate.LEFT, (1,)),
        ("n3 is lost: it has not been heard of\nit ran rank 1; output of the ranks: x", 1, Fate.LOST, (1,)),
        ("[n3] node 1 (n3) has lost node 0 (n2): it has not been heard of for 15 s", 1, Fate.LOST, (0,)),
        ("node 0 (n2) is lost, its ssh session has ended", 1, Fate.LOST, (0,)),
        ("node 0 (n2) waits for 1 other node at port 25222", 0, Fate.QUIET, ()),
        ("rank 1 (vm) is slow: 0.32 s of its own work a step", 0, Fate.SLOW, (1,)),
        ("rank 0 (vm, pid 1) failed: exit code 2\nthe ranks' settings differ: rank 1 has {}, all others {}", 2,
         Fate.REFUSED, (1,)),
        ("rank 0 (vm, pid 1) failed: exit code 2\nthe ranks run different code: helper (393a520a0395 on rank 0, 2, "
         "198f49b38619 on rank 1). All", 2, Fate.REFUSED, (1,)),
        ("rank 2 (vm, pid 1) failed: exit code 5\nthe loss is not finite; rank 1: samples 4, 5", 5,
         Fate.NOT_FINITE, (1,)),
        ("rank 0 (vm, pid 1) failed: exit code 6\nx differs on rank 1, against the majority of 3 ranks", 6,
         Fate.DIVERGED, (1,)),
        ("all is well", 0, Fate.QUIET, ()),
        ("oh", 134, Fate.ENDED, ()),
        ("working", None, Fate.HUNG, ()),
    ],
)  # fmt: skip
def test_the_rank_and_class_that_paceline_names(text: str, code: int | None, end: Fate, named: tuple[int, ...]) -> None:
    said = paceline(text, code)
    assert (said.end, said.named) == (end, named)


def test_a_tie_names_both_and_blames_nobody() -> None:
    said = paceline(TIE, 4)
    assert said.tie and said.named == (0, 1)


def test_the_written_diagnosis_knows_the_class_better_than_the_page() -> None:
    diagnosis = Diagnosis(StopKind.STOPPED, causes=(1,))
    assert paceline(STALL, 3, diagnosis).end is Fate.STOPPED


def test_what_a_rank_prints_itself_names_nobody() -> None:
    for line in ("STALL after 5.6 s (world 3). CAUSE: rank 1 (vm, pid 5959)", "rank 1 (vm) is slow: 0.32 s"):
        assert paceline(f"[rank 0] {line}", 0).end is Fate.QUIET


@pytest.mark.parametrize(
    ("text", "code", "pattern", "end"),
    [
        ("paceline: port 9 is in use", 2, "port", Fate.REFUSED),
        ("WARNING: no room", 0, "room", Fate.TOLD),
        ("rank 0 (vm, pid 1) failed: x", 1, "room", Fate.ENDED),
        ("STALL (world 3). CAUSE: rank 1 (vm, pid 5)\nno room", 1, "room", None),
    ],
)
def test_without_a_rank_to_name_the_words_count(text: str, code: int, pattern: str, end: Fate | None) -> None:
    said = paceline(text, code, pattern=pattern)
    assert said.named == () and end in (said.end, None)


def test_torchruns_root_cause_is_its_answer_and_not_its_list_of_failures() -> None:
    said = said_by_torchrun(lines(ROOT_CAUSE), 1)
    assert (said.end, said.named, said.seconds) == (Fate.DIED, (0,), 3.0)
