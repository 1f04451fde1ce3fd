"""Is an answer right, whom does a text blame, and what does the table say of many?"""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fate, Fault
from benchmarks.faults.reading import ROOT_CAUSE, Said, said_by_paceline, said_by_torchrun
from benchmarks.faults.run import USERS, Score, marked_lines, score
from benchmarks.faults.setups import Ran
from benchmarks.faults.table import markdown, rows, totals
from msgspec.structs import replace as replaced
from tests.rendered import rendered

from paceline.protocol.evidence import Diagnosis, DiagnosisKind

STALL = (
    "STALL after 5.6 s (world 3). CAUSE: rank {rank} (vm, pid 5)\n  rank 1 is in sleeps at strikes.py:{line}, state S"
)
LINE = marked_lines(USERS / "strikes.py", "sleeps")[0]


def scored(
    folder: Path, fault: Fault, text: str, code: int | None, *, left: tuple[str, ...] = (), struck: bool = True
) -> Score:
    if struck:
        (folder / "struck-1").write_text("100.0")
    ran = Ran(code, tuple((106.0, line) for line in text.split("\n")), 90.0, 107.0, left, ())
    return score(fault, "paceline", ran, folder)


def test_the_right_rank_line_class_and_code(tmp_path: Path) -> None:
    one = scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=1, line=LINE), 3)
    assert one.right_rank and one.right_line and one.right_end and one.right_code
    assert (one.verdict_seconds, one.exit_seconds) == (6.0, 7.0)  # since it struck, not since the start


@pytest.mark.parametrize(
    ("rank", "line", "code", "wrong"),
    [
        ("0", LINE, 3, "right_rank"),
        ("0, 1", LINE, 3, "right_rank"),
        (1, LINE + 1, 3, "right_line"),
        (1, LINE, 1, "right_code"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_wrong(tmp_path: Path, rank: object, line: int, code: int, wrong: str) -> None:
    one = scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=rank, line=line), code)
    assert not getattr(one, wrong)
    assert sum(not getattr(one, name) for name in ("right_rank", "right_line", "right_end", "right_code")) == 1


def test_a_run_in_which_nothing_struck_proves_nothing(tmp_path: Path) -> None:
    assert not scored(tmp_path, FAULTS["short-stop"], "done", 0, struck=False).right_rank
    assert not scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=1, line=LINE), 3, struck=False).right_rank


def test_a_traceback_before_torchruns_root_cause_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "struck-1").write_text("100.0")
    cause = f"{ROOT_CAUSE}:\n[0]:\n  rank      : 1 (local_rank: 1)"
    (line,) = marked_lines(USERS / "strikes.py", "raises")
    for text, right in ((f'  File "/x/strikes.py", line {line}, in raises\n{cause}', True), (cause, False)):
        ran = Ran(1, tuple((106.0, words) for words in text.split("\n")), 90.0, 107.0, (), ())
        found = score(FAULTS["raises"], "accelerate", ran, tmp_path)
        assert (found.right_rank, found.right_line, found.right_code) == (True, right, None)


ANSWERS = [
    ("other-shape-of-two", "RANKS DISAGREE: rank 0 against rank 1 (world 2)", 4, True),
    ("other-shape-of-two", "MISMATCH (world 2). CAUSE: rank 1 (vm, pid 4)", 4, False),  # either may be wrong
    ("short-stop", "done", 0, True),
    ("short-stop", STALL.format(rank=1, line=LINE), 3, False),  # nothing is wrong
    ("short-stop", "working", None, False),  # it hung
    ("shm-full", "rank 0 (vm, pid 4) failed: 1\nno room in /dev/shm", 1, True),  # no rank is the answer
    ("shm-full", "rank 0 (vm, pid 4) failed: 1\nOSError", 1, False),
]


@pytest.mark.parametrize(("fault", "text", "code", "right"), ANSWERS)
def test_where_no_single_rank_is_the_answer(
    tmp_path: Path, fault: str, text: str, code: int | None, right: bool
) -> None:
    assert scored(tmp_path, FAULTS[fault], text, code).right_rank is right


def test_the_table_has_torchrun_beside_it_and_counts_everything(tmp_path: Path) -> None:
    good = scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=1, line=LINE), 3)
    bad = scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=0, line=LINE), 3, left=("4 sleep",))
    other = replaced(bad, launcher="torchrun", right_code=None, right_line=None)
    (row,) = rows([good, bad, other], FAULTS)
    assert row[:3] == ["sleeps", "1", "1/2 (0)"] and row[2 + 6] == "1" and row[2 + 7] == "NO (0)"
    rendered(totals([good, bad, other], FAULTS))
    assert "| sleeps | 1 | 1/2 (0) |" in markdown([good, bad, other], FAULTS)


def test_faults_written_after_the_judge_are_counted_apart(tmp_path: Path) -> None:
    late = {"sleeps": replace(FAULTS["sleeps"], late=True), "spins": FAULTS["spins"]}
    one = scored(tmp_path, FAULTS["sleeps"], STALL.format(rank=1, line=LINE), 3)
    rendered(totals([one, one, replaced(one, fault="spins")], late))


# ---- whom a text blames ---------------------------------------------------------------------------------------------

STALL_PAGE = """STALL after 5.6 s (world 3). CAUSE: rank 1 (vm, pid 5959)
  rank 1 did not enter all_reduce #15 [6922] float32; it is in sleeps at strikes.py:171, state S
  ranks 0, 2 wait in it, called from program.py:103"""
TIE = """RANKS DISAGREE: rank 0 against rank 1 (world 2); one of them is wrong
  rank 0 called all_reduce #16 [5] float32 at program.py:152 in reduce_totals"""
ROOT_CAUSE_PAGE = """Failures:
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
        (STALL_PAGE, 3, Fate.BEHIND, (1,)),
        ("MISMATCH at step 7 (world 3). CAUSE: ranks 1, 2 (vm, pids 4, 5)", 4, Fate.MISMATCH, (1, 2)),
        ("NETWORK after 5.1 s (world 4). No rank identified as the cause", 3, Fate.NETWORK, ()),
        ("rank 1 (vm, pid 31585) failed: killed by SIGKILL", 137, Fate.DIED, (1,)),
        ("ranks 0, 2 (a, b) failed: exit code 1", 1, Fate.DIED, (0, 2)),
        ("all 3 ranks (vm) failed: exit code 1", 1, Fate.DIED, (0, 1, 2)),
        ("rank 1 (vm, pid 4) had already ended, with code 0, while others ran\n"
         "other ranks then lost the connection to it:\n"
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
    diagnosis = Diagnosis(DiagnosisKind.STOPPED, causes=(1,))
    assert paceline(STALL_PAGE, 3, diagnosis).end is Fate.STOPPED


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
    said = said_by_torchrun(lines(ROOT_CAUSE_PAGE), 1)
    assert (said.end, said.named, said.seconds) == (Fate.DIED, (0,), 3.0)
