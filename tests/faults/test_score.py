"""Is an answer right, and what does the table say of many?"""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fault
from benchmarks.faults.reading import ROOT_CAUSE
from benchmarks.faults.run import USERS, Score, marked_lines, score
from benchmarks.faults.setups import Ran
from benchmarks.faults.table import markdown, rows, totals
from msgspec.structs import replace as replaced
from tests.rendered import rendered

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
