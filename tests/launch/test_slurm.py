"""The batch script: its text, that no user's text can become anything but text in it, and what is refused."""

import os
import shlex
import shutil
import string
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.errors import raises

from paceline.launch.slurm import queue
from paceline.launch.slurm.plan import batch_script, plan_slurm
from paceline.launch.slurm.queue import (
    CurrentAllocation,
    JobState,
    allocation_problem,
    check_job_fits_allocation,
    current_allocation,
    parse_job,
    parse_sinfo,
    remove_sbatch_override_variables,
)
from paceline.protocol.job import AllocationRequest, JobSpec, NodePlan

JOB = JobSpec(
    argv=("/usr/bin/python3", "-m", "paceline", "train", "--config", "/runs/a/submit-1/config.toml"), nproc=2,
    run_id="5f", threads=0, name="mnist resnet18", nodes=2, min_nodes=2, run_dir="/runs/a",
    submit_dir="/runs/a/submit-1", secret="0f" * 32, cwd="/home/me/my work", python="/usr/bin/python3",
    env={"TOKEN": "hf_1234"}, modules=("cuda/12.4",), activate="conda:ml",
    slurm=AllocationRequest(
        minutes=20, partition="gpu", gpus_per_node=2, cpus_per_rank=4,
        options=("mem=16G", "comment=it's mine", "exclusive"),
    ),
)  # fmt: skip

GOLDEN = (Path(__file__).parent / "golden.sbatch").read_text()


def test_the_batch_script_is_this_text() -> None:
    assert batch_script(JOB) == GOLDEN


def test_the_plan_is_complete_and_keeps_secrets_out_of_the_script() -> None:
    plan = plan_slurm(JOB)
    assert plan.submit_command is not None
    assert plan.submit_command.argv == ("sbatch", "--parsable", f"{JOB.submit_dir}/job.sbatch")
    node = msgspec.json.decode(plan.files["plan.json"], type=NodePlan)
    assert (node.node, node.nodes, node.nproc, node.argv, node.secret) == (-1, 2, 2, JOB.argv, JOB.secret)
    assert (node.run_dir, node.cwd, node.env, node.threads) == ("/runs/a", JOB.cwd, {"TOKEN": "hf_1234"}, 0)
    assert node.modules == () and node.activate == ""  # the script has done it
    assert "hf_1234" not in plan.files["job.sbatch"] and JOB.secret not in plan.files["job.sbatch"]


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("activate", ["", "env.sh", "conda:ml"])
@pytest.mark.parametrize("save_seconds", [0, 120])
def test_shellcheck_finds_nothing(tmp_path: Path, activate: str, save_seconds: int) -> None:
    job = replace(JOB, activate=activate, slurm=replace(JOB.slurm, save_seconds=save_seconds))
    (tmp_path / "job.sbatch").write_text(batch_script(job))
    # 1090, 1091: it cannot look into other people's files
    argv = ("shellcheck", "-s", "bash", "-e", "SC1090,SC1091", "job.sbatch")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_without_a_warning_only_preemption_queues_it_again() -> None:
    text = batch_script(replace(JOB, slurm=replace(JOB.slurm, save_seconds=0)))
    assert "--signal" not in text and "preempted" in text


# ---- hostile text ----------------------------------------------------------------------------------------------------

WICKED = st.sampled_from(
    ["'", '"', "\\", "$(touch PWNED)", "`touch PWNED`", "; touch PWNED ;", "${HOME}", "#", "!", "*", "&", "|", " ", "~",
     "--x", "é", "%j", "%%", "\u2028", "{", "}", "{cpus}", "<", ">PWNED"]
)  # fmt: skip
WORDS = st.lists(WICKED | st.text(string.ascii_letters + string.digits, min_size=1, max_size=3), min_size=1, max_size=6)
TEXT = WORDS.map("".join)
NAMES = TEXT.map(lambda text: text.replace("\\", "").strip(" ") or "a").filter(lambda name: "/" not in name)


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def run_script(job: JobSpec, folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    """Run the batch script with stand-ins for Slurm's commands; what each was called with."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in ("srun", "module", "conda"):
        stub(stubs, name, f"printf '%s\\0' \"$@\" >> {shlex.quote(str(folder))}/{name}.argv")
    stub(stubs, "scontrol", "echo n1; echo n2")
    stub(stubs, "hostname", "echo 10.0.0.1 10.0.0.2")
    (folder / "job.sbatch").write_text(batch_script(job), newline="")
    env = {"PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False
    )
    called = {path.stem: path.read_text().split("\0")[:-1] for path in folder.glob("*.argv")}
    return done, called


@settings(max_examples=40, deadline=None, phases=(Phase.generate,))  # to shrink an example would take minutes
@given(python=TEXT, run=NAMES, cwd=NAMES, activate=NAMES, module=TEXT, comment=TEXT, partition=TEXT, name=TEXT)
def test_no_text_of_a_user_becomes_a_line_or_a_command(
    python: str, run: str, cwd: str, activate: str, module: str, comment: str, partition: str, name: str
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / cwd).mkdir()
        (folder / cwd / activate).write_text('echo "activated: $NOT_SET"; [ -n "$NOT_SET" ]')
        python = f"/opt/{python}/python3"
        asked = replace(JOB.slurm, partition=partition, options=(f"comment={comment}",))
        job = replace(
            JOB, name=name, python=python, cwd=str(folder / cwd), submit_dir=str(folder / run), modules=(module,),
            activate=activate, slurm=asked,
        )  # fmt: skip
        plan_slurm(job)  # is not refused
        text = batch_script(job)
        harmless = batch_script(replace(JOB, activate="x", slurm=replace(asked, options=("comment=x",))))
        assert len(text.split("\n")) == len(harmless.split("\n"))
        options = [shlex.split(line[8:], comments=True) for line in text.split("\n") if line.startswith("#SBATCH ")]
        assert all(len(words) == 1 for words in options)
        assert [f"--partition={partition}"] in options and [f"--comment={comment}"] in options
        assert [f"--output={folder}/{run.replace('%', '%%')}/slurm-%j.out"] in options

        done, called = run_script(job, folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "activated: \n", "")
        plan = ["--plan", f"{folder}/{run}/plan.json"]
        heads = ["--node0", "n1", "--node0", "10.0.0.1", "--node0", "10.0.0.2"]
        assert called["srun"][-12:] == [python, "-P", "-m", "paceline.launch.agent", *plan, *heads]
        assert called["module"] == ["load", module]
        assert not list(folder.rglob("PWNED*"))


@pytest.mark.parametrize("field", ["python", "cwd", "activate", "modules", "submit_dir", "partition", "options"])
@pytest.mark.parametrize("bad", ["a\nb", "a\0b", "a\rb", "a\x1bb", "a\udcffb"])
def test_what_would_end_a_line_is_refused(field: str, bad: str) -> None:
    asked = {"partition": replace(JOB.slurm, partition=bad), "options": replace(JOB.slurm, options=(f"comment={bad}",))}
    values = {"modules": (bad,)}
    job = replace(JOB, slurm=asked[field]) if field in asked else replace(JOB, **{field: values.get(field, bad)})
    with raises("control-characters"):
        plan_slurm(job)


def test_a_module_or_activation_that_fails_ends_the_script(tmp_path: Path) -> None:
    done, called = run_script(replace(JOB, cwd=str(tmp_path), modules=(), activate="missing.sh"), tmp_path)
    assert done.returncode == 2 and "--activate " in done.stderr and "srun" not in called
    shutil.rmtree(tmp_path / "stubs")
    stubs = tmp_path / "failing"
    stubs.mkdir()
    stub(stubs, "module", "echo no such module >&2; exit 1")
    (tmp_path / "job.sbatch").write_text(batch_script(replace(JOB, cwd=str(tmp_path), activate="")))
    env = {"PATH": f"{stubs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "no such module\n")


def test_conda_is_found_where_it_is_only_a_function_of_interactive_shells(tmp_path: Path) -> None:
    base = tmp_path / "my conda"
    (base / "etc/profile.d").mkdir(parents=True)
    (base / "bin").mkdir()
    stub(base / "bin", "conda", f"echo {shlex.quote(str(base))}")
    (base / "etc/profile.d/conda.sh").write_text(': "$NOT_SET"; conda() { echo "$*" > activated; }')
    text = batch_script(replace(JOB, cwd=str(tmp_path), modules=())).replace("srun ", "true ")
    env = {"PATH": os.environ["PATH"], "CONDA_EXE": str(base / "bin/conda"), "SLURM_JOB_NODELIST": "n1"}
    text = text.replace('scontrol show hostnames "$SLURM_JOB_NODELIST"', "echo n1")
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "activated").read_text() == "activate ml\n"


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("nodes=3", "--nodes"), ("ntasks-per-node=4", "--nproc"), ("cpus-per-task=4", "--cpus-per-rank"),
        ("time=10", "--time"), ("partition=x", "--partition"), ("gpus=4", "--gpus-per-node"),
        ("gres=gpu:a100:2", "--gpus-per-node"), ("gres=gpu", "--gpus-per-node"),
        ("gre=lustre,gpu:2", "--gpus-per-node"),
        ("output=x", "run folder"), ("out=x", "run folder"),  # sbatch takes abbreviations
        ("error=x", "run folder"), ("signal=B:TERM@1", "--save-before"), ("no-requeue", "paceline cancel"),
        ("open-mode=truncate", "appended"), ("job-name=x", "name"), ("array=0-9", "several times"),
        ("N=3", "long name"), ("--mem=1G", "long name"), ("", "long name"),
    ],
)  # fmt: skip
def test_an_option_that_paceline_sets_is_refused_with_what_to_say_instead(option: str, instead: str) -> None:
    with raises("sbatch-not-key-value" if instead == "long name" else "sbatch-option-is-ours", value=option) as caught:
        plan_slurm(replace(JOB, slurm=replace(JOB.slurm, options=(option,))))
    assert instead in str(caught.value)


@pytest.mark.parametrize("option", ["mem=16G", "account=x", "gres=lustre:1", "exclusive", "qos=gpu", "constraint=a&b"])
def test_any_other_option_of_sbatch_stands_in_the_script(option: str) -> None:
    text = plan_slurm(replace(JOB, slurm=replace(JOB.slurm, options=(option,)))).files["job.sbatch"]
    assert [f"--{option}"] in [shlex.split(line[8:]) for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize(
    ("change", "code", "fields"),
    [
        ({"slurm": AllocationRequest(gpus_per_node=4)}, "gpus-and-workers-differ", {"value": 4, "nproc": 2}),
        ({"slurm": AllocationRequest(minutes=2, save_seconds=120)}, "no-time-left", {"minutes": 2, "seconds": 120}),
        ({"slurm": AllocationRequest(minutes=0)}, "time-too-short", {"value": 0}),
        ({"slurm": AllocationRequest(save_seconds=-1)}, "save-before-out-of-range", {"value": -1}),
        ({"min_nodes": 1}, "slurm-nodes-fixed", {"nodes": 2}),
        ({"submit_dir": "/a\\b"}, "backslash-in-folder", {}),
        ({"python": "/opt/my python"}, "python-with-spaces", {"value": "/opt/my python"}),
    ],
)
def test_a_contradiction_is_refused_before_it_queues(
    change: dict[str, object], code: str, fields: dict[str, object]
) -> None:
    with raises(code, **fields):
        plan_slurm(replace(JOB, **change))  # type: ignore[arg-type]


CLUSTER = """\
main*|4|2|(null)|1:00:00|up
gpu|2|64|gpu:a100:8(S:0-1),shard:16|2-00:00:00|up
gpu|6|32|gpu:4|2-00:00:00|up
old|9|8|(null)|infinite|down
nonsense
"""


@pytest.mark.parametrize(
    ("partition", "nodes", "nproc", "asked", "words"),
    [
        ("main", 4, 2, AllocationRequest(), ""),
        ("main", 5, 2, AllocationRequest(), "--nodes 5 is more than the 4 nodes of partition main"),
        ("main", 4, 3, AllocationRequest(),
         "= 3 CPUs on each node: partition main has 0 nodes with at least 3 CPUs (most: 2)"),
        ("main", 1, 1, AllocationRequest(minutes=61),
         "--time 61 is more than the 60 minutes that partition main allows"),
        ("gpu", 8, 4, AllocationRequest(gpus_per_node=4), ""),
        ("gpu", 3, 8, AllocationRequest(gpus_per_node=8), "partition gpu has 2 nodes with at least 8 GPUs (most: 8)"),
        ("gpu", 3, 8, AllocationRequest(cpus_per_rank=8), "= 64 CPUs on each node: partition gpu has 2 nodes"),
        ("old", 1, 1, AllocationRequest(), "partition old is down"),
    ],
)  # fmt: skip
def test_what_would_queue_for_ever_is_told(
    partition: str, nodes: int, nproc: int, asked: AllocationRequest, words: str
) -> None:
    job = replace(JOB, nodes=nodes, nproc=nproc, slurm=asked)
    found = allocation_problem(partition, [one for one in parse_sinfo(CLUSTER) if one.partition == partition], job)
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("partition", "nodes", "nproc", "gpus", "cores"),
    [("gpu", 2, 8, 8, 8), ("gpu", 2, 4, 4, 16), ("gpu", 3, 4, 4, 8), ("gpu", 8, 3, 1, 10), ("gpu", 9, 1, 1, 1),
     ("main", 1, 4, 0, 1)],
)  # fmt: skip
def test_ranks_with_gpus_get_no_more_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch, partition: str, nodes: int, nproc: int, gpus: int, cores: int
) -> None:
    monkeypatch.setattr(queue, "run_slurm_command", lambda *_: subprocess.CompletedProcess((), 0, CLUSTER, ""))
    asked = AllocationRequest(partition=partition, gpus_per_node=gpus)
    job = replace(JOB, nodes=nodes, nproc=nproc, slurm=asked)
    assert queue.cores_per_rank(None, job, {}) == cores
    assert queue.cores_per_rank(CurrentAllocation("12", 2, 12, 2, "gpu"), job, {}) == 12 // nproc


# ---- inside an allocation --------------------------------------------------------------------------------------------

SALLOC = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "8,4", "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_PARTITION": "gpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, CurrentAllocation("12", 2, 4, 2, "gpu")),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2)"}, CurrentAllocation("12", 2, 16, 2, "gpu")),
        ({"SLURM_GPUS_PER_NODE": "a100:3"}, CurrentAllocation("12", 2, 4, 3, "gpu")),
        ({"SLURM_STEP_ID": "0"}, None),  # a task of srun
        ({"SLURM_STEP_ID": "4294967290"}, CurrentAllocation("12", 2, 4, 2, "gpu")),  # salloc's shell on a node
        ({"SLURM_JOB_ID": ""}, None),
    ],
)
def test_an_allocation_is_known_by_its_variables(changes: dict[str, str], held: CurrentAllocation | None) -> None:
    assert current_allocation({**SALLOC, **changes}) == held


@pytest.mark.parametrize(
    ("change", "asked", "code", "fields"),
    [
        ({"nodes": 1}, AllocationRequest(), "more-nodes-than-held", {"value": 1, "nodes": 2}),
        ({"nproc": 5}, AllocationRequest(), "more-cpus-than-held", {"needed": 5, "cpus": 4}),
        ({}, AllocationRequest(cpus_per_rank=3), "more-cpus-than-held", {"needed": 6}),
        ({"nproc": 4}, AllocationRequest(gpus_per_node=4), "more-gpus-than-held", {"value": 4, "gpus": 2}),
        ({}, AllocationRequest(partition="main"), "other-partition-than-held", {"value": "main", "partition": "gpu"}),
        (
            {},
            AllocationRequest(minutes=5, options=("mem=1G",)),
            "option-within-job",
            {"options": "--time and --sbatch"},
        ),
    ],
)
def test_a_job_of_another_shape_than_the_allocation_is_refused(
    change: dict[str, int], asked: AllocationRequest, code: str, fields: dict[str, object]
) -> None:
    held = CurrentAllocation("12", 2, 4, 2, "gpu")
    check_job_fits_allocation(held, replace(JOB, slurm=AllocationRequest(gpus_per_node=2, partition="gpu")))
    with raises(code, **fields):
        check_job_fits_allocation(held, replace(JOB, **{"slurm": asked, **change}))  # type: ignore[arg-type]


# ---- Slurm's words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "found", "code"),
    [
        ("JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0", JobState("RUNNING", nodes="n[1-2]", start_count=2), 1),
        ("JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0", JobState("COMPLETED", nodes="n[1-2]"), 0),
        ("JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=7:0", None, 7),
        ("JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:15", None, 143),
        ("JobState=NODE_FAIL Reason=None Restarts=0 ExitCode=0:0", None, 1),
    ],
)
def test_a_jobs_state_is_read_from_slurms_words(fields: str, found: JobState | None, code: int) -> None:
    text = f"JobId=12 JobName=run {fields} NodeList=n[1-2] Comment=a JobState=COMPLETED ExitCode=0:0"
    assert found is None or parse_job(text) == found
    assert parse_job(text).exit_code == code


def test_a_job_that_can_never_start_is_told_as_such() -> None:
    assert "cannot start" in str(JobState("PENDING", "DependencyNeverSatisfied"))
    assert str(JobState("PENDING", "Resources")) == "PENDING (Resources)"


def test_variables_of_the_shell_do_not_change_the_batch_script() -> None:
    env = {"SBATCH_SIGNAL": "x", "SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "p", "SBATCH_TIMELIMIT": "1", "HOME": "h"}
    assert remove_sbatch_override_variables(env, partition=True, minutes=True) == {"SBATCH_ACCOUNT": "a", "HOME": "h"}
    assert "SBATCH_PARTITION" in remove_sbatch_override_variables(env, partition=False, minutes=False)
