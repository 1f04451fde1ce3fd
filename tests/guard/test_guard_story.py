"""What a user reads of a stall: the page, the warning, the folder."""

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.errors import raises
from tests.rendered import rendered

from paceline.guard import report
from paceline.guard.judge import diagnose
from paceline.guard.report import format_evidence, format_report, format_warning, read_diagnosis, same_diagnosis
from paceline.guard.sentences import format_ranks
from paceline.protocol.evidence import (
    Diagnosis,
    DiagnosisKind,
    Evidence,
    Frame,
    LoaderWorker,
    Op,
    Phase,
    RankSample,
    Stack,
)

OP = Op("0", 9876, "all_reduce", "bucket 3", "[1732]", "float32", "train.py:97 in step")
ESCAPES = "\x1b[2Jpwned\x1b]0;title\x07\r\n\x9b31m\u202e"


def rank(number: int, *, stuck: bool = False, **changes: Any) -> Evidence:
    stack = (Frame("train.py", 88, "load_batch"),) if stuck else (Frame("torch/distributed/x.py", 1, "all_reduce"),)
    usual: dict[str, Any] = {
        "host": f"node{number}", "state": "S", "answered": True, "step": 1234, "ops": () if stuck else (OP,),
        "groups": {"0": (0, 1, 2, 3)}, "stacks": (Stack("main", stack),), "still_seconds": 12.4,
    }  # fmt: skip
    return Evidence(rank=number, pid=4709 + number, **(usual | changes))


STALLED = [rank(0), rank(1), rank(2, stuck=True), rank(3)]
FOLDER = "runs/a/attempt-1/diagnosis-1"


def told(diagnosis: Diagnosis, evidence: list[Evidence] = STALLED, folder: str = FOLDER) -> list[str]:
    lines = format_report(diagnosis, evidence, waited_seconds=12.4, folder=folder, run="runs/a").split("\n")
    assert len(lines) <= report.MAX_LINES
    return lines


def test_the_page_of_a_stall_reads_as_the_documentation_promises() -> None:
    rendered(told(diagnose(STALLED)))


def test_the_first_line_names_the_guilty_or_says_that_nobody_is_blamed() -> None:
    blamed = [(0, 2), (0, 1, 2, 3), (9,)]  # of rank 9 nothing is known
    diagnoses = [Diagnosis(kind, (1,) if kind < DiagnosisKind.NETWORK else ()) for kind in DiagnosisKind]
    diagnoses += [Diagnosis(DiagnosisKind.BEHIND, ranks) for ranks in blamed]
    diagnoses.append(Diagnosis(DiagnosisKind.LEFT, (), ((0,), (1, 2))))
    rendered(f"{diagnosis.kind.name}: {told(diagnosis)[0]}" for diagnosis in diagnoses)


def test_a_long_page_is_cut_and_says_so_but_the_way_to_the_rest_stays() -> None:
    diagnosis = Diagnosis(DiagnosisKind.BEHIND, (2,), sentences=tuple(f"sentence {n} " + "x" * 500 for n in range(40)))
    lines = told(diagnosis, folder="/" + "long/" * 60)
    assert len(lines) == report.MAX_LINES
    assert str(1 + 40 * 2 - 13) in lines[-2] and "diagnosis.json" in lines[-2]  # 40 sentences of two lines each
    assert "/" + "long/" * 60 in lines[-1] and lines[-1].endswith("paceline hang runs/a")
    assert all(len(line) <= report.MAX_COLUMNS for line in lines[:-1])


@pytest.mark.parametrize("count", range(11, 17))
@pytest.mark.parametrize("folder", ["f", "/" + "long/" * 60], ids=["beside", "below"])
def test_no_page_is_longer_than_15_lines(count: int, folder: str) -> None:
    lines = told(Diagnosis(DiagnosisKind.BEHIND, (2,), sentences=("x",) * count), folder=folder)
    assert len(lines) <= report.MAX_LINES and "paceline hang" in lines[-1]


def test_what_a_rank_has_written_does_not_steer_the_terminal() -> None:
    hostile = rank(2, stuck=True, host=ESCAPES, stacks=(Stack("main", (Frame(ESCAPES, 88, ESCAPES),)),), error_text="")
    hostile = msgspec.structs.replace(hostile, ops=(Op(ESCAPES, 1, ESCAPES, ESCAPES, ESCAPES, ESCAPES, ESCAPES),))
    evidence = [rank(0), hostile]
    text = "\n".join(told(diagnose(evidence), evidence, ESCAPES)) + format_evidence(hostile)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "pwned" in text


def test_ranks_are_listed_in_runs() -> None:
    assert format_ranks([7, 0, 1, 3, 4, 5, 6, 9, 9]) == "ranks 0, 1, 3-7, 9"
    assert (format_ranks([2]), format_ranks({3, 2})) == ("rank 2", "ranks 2, 3")


def test_a_warning_names_those_for_whom_the_others_wait_and_nobody_if_all_wait() -> None:
    all_wait = [RankSample(n, "n1", 7, phase=Phase.SYNC, step=1234 * (n == 1), waiting=True) for n in range(4)]
    loads = [*all_wait[:2], RankSample(2, "n1", 7, phase=Phase.DATA), all_wait[3]]
    rendered(format_warning(ranks, still_seconds=6.2, window_seconds=12.4) for ranks in (loads, all_wait, all_wait[2:]))


def test_what_was_written_is_read_again_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    diagnosis, folder = diagnose(STALLED), tmp_path / "diagnosis-1"
    report.write_diagnosis(folder, diagnosis, STALLED, waited_seconds=12.4)
    found = read_diagnosis(folder)
    assert (found.diagnosis, list(found.evidence), found.waited_seconds) == (diagnosis, STALLED, 12.4)
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.json", *(f"rank-{n}.txt" for n in range(4))]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert (folder / "rank-2.txt").read_text() == format_evidence(STALLED[2])


def test_a_folder_that_exists_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "diagnosis-1").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        report.write_diagnosis(tmp_path / "diagnosis-1", diagnose(STALLED), STALLED, waited_seconds=1.0)
    assert not list((tmp_path / "victim").iterdir())


def test_a_diagnosis_that_cannot_be_written_as_a_whole_is_not_there(tmp_path: Path) -> None:
    strange = [STALLED[0], msgspec.structs.replace(STALLED[1], rank="/no/1")]  # its file cannot be made
    with pytest.raises(FileNotFoundError):
        report.write_diagnosis(tmp_path / "diagnosis-1", diagnose(STALLED), strange, waited_seconds=1.0)
    with raises("diagnosis-not-readable", path=tmp_path / "diagnosis-1" / "diagnosis.json"):
        read_diagnosis(tmp_path / "diagnosis-1")


@pytest.mark.parametrize(
    ("content", "code", "fields"),
    [
        (b'{"format": "paceline-diagnosis", "version": 2}', "diagnosis-of-other-version", {"version": 2}),
        (b'{"format": "somebody else\'s", "version": 1}', "diagnosis-damaged", {}),
        (b'{"format": "paceline-diagnosis", "version": 1, "diagnosis": 3}', "diagnosis-damaged", {}),
        (b'{"format": "paceline-ver', "diagnosis-damaged", {}),
        (b"[" * 100_000, "diagnosis-damaged", {}),
        (b"", "diagnosis-damaged", {}),
    ],
    ids=["newer", "foreign", "wrong type", "torn", "deep", "empty"],
)
def test_a_file_of_another_version_or_of_another_program_is_an_error(
    tmp_path: Path, content: bytes, code: str, fields: dict[str, Any]
) -> None:
    (tmp_path / "diagnosis.json").write_bytes(content)
    with raises(code, path=tmp_path / "diagnosis.json", **fields):
        read_diagnosis(tmp_path)


def test_a_diagnosis_behind_a_link_is_not_followed(tmp_path: Path) -> None:
    report.write_diagnosis(tmp_path / "real", diagnose(STALLED), STALLED, waited_seconds=1.0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diagnosis.json").symlink_to(tmp_path / "real" / "diagnosis.json")
    with raises("diagnosis-not-readable"):
        read_diagnosis(tmp_path / "other")


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "diagnosis.json")
    with raises("diagnosis-not-readable", strerror="is not a plain file"):
        read_diagnosis(tmp_path)


def test_the_same_stall_at_the_same_step_is_the_same_diagnosis_whatever_its_number() -> None:
    diagnosis = diagnose(STALLED)
    again = msgspec.structs.replace(diagnosis, op=msgspec.structs.replace(OP, seq=12), sentences=("other words",))
    assert same_diagnosis(diagnosis, again)
    for other in ({"step": 1235}, {"causes": (1,)}, {"site": "train.py:5 in f"}, {"kind": DiagnosisKind.STOPPED}):
        assert not same_diagnosis(diagnosis, msgspec.structs.replace(diagnosis, **other))
    other_op = msgspec.structs.replace(OP, name="bucket 4")
    assert not same_diagnosis(diagnosis, msgspec.structs.replace(diagnosis, op=other_op))


def test_all_that_is_known_of_a_rank_stands_in_its_description() -> None:
    loaders = (LoaderWorker(1, 4801, 412, 3, "T"), LoaderWorker(2, 4802, 413, 3, ""))
    one = rank(2, loaders=loaders, native="Thread 0x1:\n  File x", phase=Phase.DATA, error_text="bad sample")
    rendered(map(format_evidence, (one, rank(0, code=3), rank(0, code=-9), rank(0, lost_reason="cut off"))))
