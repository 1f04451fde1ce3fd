"""What is written down about a start, and what can be relied on afterwards."""

import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.errors import raises

from paceline.errors import TrainingError
from paceline.launch.output import LogFollower, last_lines_range, read_lines
from paceline.launch.plan import (
    SUBMISSION_FILE,
    SubmitRecord,
    format_plan,
    make_submit_dir,
    node_plan,
    plan_local,
    read_last_submission,
    write_plan_files,
    write_submit_record,
)
from paceline.protocol.job import AllocationRequest, HangTimeout, Host, JobSpec, NodePlan


def test_every_start_has_a_private_folder_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    folders = [make_submit_dir(run) for _ in range(11)]
    assert [folder.name for folder in folders] == [f"submit-{n}" for n in range(1, 12)]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (run, *folders)} == {0o700}


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises("run-dir-not-writable"):
        make_submit_dir(tmp_path / "file" / "run")


def test_files_are_their_owners_and_never_half_there(tmp_path: Path) -> None:
    write_plan_files(tmp_path, {"plan.json": "old"})
    (tmp_path / "plan.json").chmod(0o644)
    write_plan_files(tmp_path, {"plan.json": "é\r\n"})
    assert (tmp_path / "plan.json").read_bytes() == "é\r\n".encode()
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to(tmp_path / "victim")
    write_plan_files(tmp_path, {"plan.json": "secret"})
    assert not (tmp_path / "victim").exists() and not (tmp_path / "plan.json").is_symlink()
    (tmp_path / "closed").touch()
    with raises("settings-not-written", raised=TrainingError):
        write_plan_files(tmp_path / "closed", {"plan.json": "secret"})


def test_the_newest_start_that_was_written_down_counts(tmp_path: Path) -> None:
    assert read_last_submission(tmp_path) == (tmp_path, None)
    second = SubmitRecord(
        on="ssh", started_at=2.0, nodes=2, hosts=("n1", "n2"), ssh=("ssh", "-F", "c"), command=("paceline",)
    )
    for submission in (SubmitRecord(on="slurm", started_at=1.0, slurm_job="7"), second):
        write_submit_record(make_submit_dir(tmp_path), submission)
    for number in range(3, 11):  # 10 comes after 9, also as a name
        (tmp_path / f"submit-{number}").mkdir()
    (tmp_path / "submit-10" / SUBMISSION_FILE).write_text('{"on": "slurm", ')  # torn
    assert read_last_submission(tmp_path) == (tmp_path / "submit-2", second)
    write_submit_record(tmp_path / "submit-10", SubmitRecord(on="local", started_at=3.0))
    assert read_last_submission(tmp_path) == (tmp_path / "submit-10", SubmitRecord(on="local", started_at=3.0))


def test_a_growing_file_is_read_once_in_whole_lines_that_steer_no_terminal(tmp_path: Path) -> None:
    path, shown = tmp_path / "log", ""
    tail = LogFollower(path)
    assert tail.read() == ""
    text = "step 1\n\x1b[2Jstep 2 é\n\x07last"
    for byte in text.encode():
        with path.open("ab") as file:
            file.write(bytes([byte]))
        shown += tail.read()
    assert shown == "step 1\nstep 2 é\n"
    assert tail.read(to_the_end=True) == "last\n"
    assert tail.read(to_the_end=True) == ""


def test_a_line_that_never_ends_is_shown_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 3_000_000)
    assert len(LogFollower(tmp_path / "log").read().strip()) > 100_000


@pytest.mark.parametrize("count", [0, 1, 3, 100_000, 300_000])
def test_the_last_lines_of_a_large_file(tmp_path: Path, count: int) -> None:
    lines = [f"line {number}\n" for number in range(200_000)]
    (tmp_path / "log").write_text("".join(lines))
    start, end = last_lines_range(tmp_path / "log", count)
    found = [line.text + "\n" for line in read_lines(tmp_path / "log", start, end)]
    assert found == lines[len(lines) - min(count, len(lines)) :]
    assert LogFollower(tmp_path / "log", end).read() == ""


# ---- the job --------------------------------------------------------------------------------------------------------

GOLDEN = """\
# agent 0
/usr/bin/python3 -P -m paceline.launch.agent <<'PLAN'
{
  "argv": [
    "python",
    "-m",
    "paceline",
    "train",
    "it's"
  ],
  "nproc": 2,
  "run_id": "5f",
  "threads": 4,
  "port": 29500,
  "attempt_dir": "/runs/a/attempt-0",
  "python": "/usr/bin/python3",
  "ranks": {
    "master_port": 29500
  }
}
PLAN
"""


def test_local_plan() -> None:
    job = JobSpec(
        ("python", "-m", "paceline", "train", "it's"),
        nproc=2,
        run_id="5f",
        threads=4,
        attempt_dir="/runs/a/attempt-0",
        port=29500,
        python="/usr/bin/python3",
    )
    plan = plan_local(job)
    assert format_plan(plan) == GOLDEN
    assert msgspec.json.decode(msgspec.json.encode(plan.nodes[0]), type=NodePlan) == plan.nodes[0]


def test_an_agent_receives_the_job_as_it_is_and_the_facts_of_its_node() -> None:
    job = JobSpec(
        ("x",), 2, "5f", 1, ssh=("ssh", "-v"), hang_timeout=HangTimeout.parse("6"), nodes=7, min_nodes=6, port=29500,
        env={"A": "B"}, hosts=(Host("n1"), Host("n2", 2222, 3)), slurm=AllocationRequest(minutes=5),
        grace_period_seconds=2.0,
    )  # fmt: skip
    for node, nproc in ((0, 2), (1, 3)):
        plan = node_plan(job, node, nproc=job.hosts[node].slots or 0, node0=("n1",))
        received = msgspec.json.decode(msgspec.json.encode(plan), type=NodePlan)
        assert received == plan and (received.node, received.nproc, received.node0) == (node, nproc, ("n1",))
        of_the_job = {name: getattr(received, name) for name in JobSpec.__struct_fields__}
        assert JobSpec(**{**of_the_job, "nproc": job.nproc}) == job


def test_a_port_is_the_ranks_on_one_node_and_the_head_agents_on_several() -> None:
    alone, several = (node_plan(JobSpec(("x",), 2, port=29500, nodes=nodes)) for nodes in (1, 2))
    assert (alone.ranks.master_port, alone.node0_ports) == (29500, ())
    assert (several.ranks.master_port, several.node0_ports) == (0, (29500,))


def test_the_room_imports_nothing_heavy() -> None:
    room = Path(sys.modules["paceline.launch.plan"].__file__ or "").parent
    files = [path.relative_to(room).with_suffix("") for path in room.rglob("*.py")]
    light = [path for path in files if path.name not in ("__init__", "store_proxy")]  # the latter: several hosts only
    imports = ", ".join(f"paceline.launch.{'.'.join(path.parts)}" for path in light)
    heavy = "{'torch', 'numpy', 'rich', 'psutil', 'asyncio'}"
    code = f"import sys, {imports}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.stderr.strip() == ""
