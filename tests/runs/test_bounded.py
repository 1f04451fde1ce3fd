"""A file of records stays small: the old are thinned, the new whole, and nothing that goes wrong ends a run."""

from pathlib import Path

import msgspec

from paceline.runs.machine import ClockAhead, MachineUse, file_name, machine_files, read_machine
from paceline.runs.reading import read_lines
from paceline.runs.writers import BoundedWriter


def use(at: int) -> MachineUse:
    return MachineUse(float(at), "n1", 2, 0.5, 1 << 30, 2 << 30)


def times(path: Path) -> list[float]:
    return [record.unix_time for record in read_machine(path)]


def test_a_long_run_stays_small_the_newest_whole_and_the_oldest_still_there(tmp_path: Path) -> None:
    path = tmp_path / file_name(0)
    writer = BoundedWriter(path, limit_bytes=20_000)
    for second in range(5000):
        writer.write(use(second))
    writer.close()
    kept = times(path)
    assert path.stat().st_size <= 20_000
    assert kept[0] < 500  # of ten times as many records as there is room for, some of the first
    assert kept == sorted(set(kept))
    newest = [t for t in kept if t >= kept[-1] - 50]
    assert newest == [kept[-1] - 50 + second for second in range(51)]


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / file_name(3)
    path.write_bytes(msgspec.json.encode(use(1)) + b'\n{"kind":"mach')
    writer = BoundedWriter(path)
    writer.write(use(2))
    writer.write(ClockAhead(3.0, 1, 0.5, 0.001))
    writer.close()
    assert times(path) == [1.0, 2.0, 3.0]
    assert machine_files(tmp_path) == {3: path}


def test_a_write_that_fails_is_said_once_and_raises_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / file_name(0)).mkdir()
    writer = BoundedWriter(tmp_path / file_name(0), warn=said.append)
    for second in range(3):
        writer.write(use(second))
    assert len(said) == 1
    assert writer.failed


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / file_name(0)).symlink_to(tmp_path / "elsewhere")
    said: list[str] = []
    BoundedWriter(tmp_path / file_name(0), warn=said.append).write(use(1))
    assert said
    assert [*read_lines(tmp_path / "elsewhere")] == []
