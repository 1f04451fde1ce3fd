"""Is every fault of the catalogue one that can strike, with a truth that can be checked?"""

import pytest
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.fault import Fate, Fault, Way
from benchmarks.faults.run import MARKER, USERS, marked_lines

from paceline.protocol.evidence import StopKind

ALL = list(FAULTS.values())
SOURCES = {path.name: path.read_text() for path in USERS.glob("*.py")}


def marked(name: str) -> list[str]:
    return [path.name for path in USERS.glob("*.py") if marked_lines(path, name)]


def test_every_class_of_the_judge_has_a_name_here() -> None:
    assert {kind.name for kind in StopKind} <= {*Fate.__members__}


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_the_truth_of_a_fault_is_one_that_can_be_checked(fault: Fault) -> None:
    assert fault.ends and fault.codes
    assert all(0 <= rank < fault.world for rank in fault.ranks)
    assert not (fault.single and (len(fault.causes) != 1 or fault.tie))
    assert not (fault.silent and fault.causes)
    assert not fault.words or not fault.causes


@pytest.mark.parametrize("fault", [fault for fault in ALL if fault.line], ids=lambda fault: fault.name)
def test_the_line_to_blame_is_marked_where_the_fault_strikes(fault: Fault) -> None:
    where = marked(fault.name)
    assert where
    assert fault.way is not Way.TASK or {"task.py", "strikes.py"} & {*where}


def test_every_marker_is_of_a_fault_that_there_is() -> None:
    names = {
        name for text in SOURCES.values() for match in MARKER.finditer(text) for name in match["names"].split(", ")
    }
    assert names - {"name`"} <= set(FAULTS)  # the docstring explains what a marker is


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_the_program_knows_every_fault_that_does_not_come_from_outside(fault: Fault) -> None:
    from_outside = fault.setup or fault.way is Way.HOSTS or fault.name == "nothing"
    name = f'"{fault.name}"'
    by_function = f"\ndef {fault.name.replace('-', '_')}("  # strikes.py makes the names of its functions
    wanted = ["task.py"] if fault.way is Way.TASK else []
    for file in [*wanted, *(["program.py"] if fault.beside else [])]:
        text = SOURCES[file] + (SOURCES["strikes.py"] + SOURCES["late_strikes.py"] if file == "program.py" else "")
        assert from_outside or name in text or by_function in text, f"{file} does nothing for {fault.name}"
