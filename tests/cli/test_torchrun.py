"""torchrun's words: every one that its own parser knows has a meaning here, and means what it means there."""

import re
from pathlib import Path

import pytest
from tests.errors import raises
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from paceline.cli.launch import takes_value_by_option
from paceline.cli.torchrun import (
    FLAGS,
    OPTIONS_WITHOUT_VARIABLE,
    SHORT_OPTIONS,
    TORCHRUN_OPTIONS,
    LaunchArguments,
    read_arguments,
)

NODES = "--nnodes 2 --node-rank 1 --master-addr n1 --master-port 29500"
RUN = ("python", "-P", "-m", "torch.distributed.run")


def typed(line: str, environ: dict[str, str] | None = None) -> LaunchArguments:
    return read_arguments(line.split(), environ or {}, takes_value_by_option())


def test_every_option_of_torchruns_own_parser_is_in_the_table() -> None:
    actions = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
    names = {f"--{action.dest.replace('_', '-')}": action for action in actions}
    assert names.keys() <= set(TORCHRUN_OPTIONS) and len(TORCHRUN_OPTIONS) == len(set(TORCHRUN_OPTIONS))
    for name, action in names.items():
        assert (name in FLAGS) is (action.nargs == 0), name
        assert (name in OPTIONS_WITHOUT_VARIABLE) is not isinstance(action, env | check_env), name
        assert {SHORT_OPTIONS.get(one, one.replace("_", "-")) for one in action.option_strings} == {name}


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        ("--nproc 4 train.py --nproc 3", "--nproc 4", "train.py --nproc 3"),
        ("--nproc_per_node=4 train.py -- --epochs 5", "--nproc=4", "train.py -- --epochs 5"),
        ("--nproc-per-node auto -- train.py", "--nproc=auto", "train.py"),
        ("-m --nproc-per-node 2 pkg.train -r 3", "--nproc=2", "-m pkg.train -r 3"),
        ("--module pkg.train", "", "-m pkg.train"),
        ("--module gcc/12 --trust -- train.py", "--module gcc/12 --trust", "train.py"),
        ("--module=gcc/12 train.py", "--module=gcc/12", "train.py"),
        ("-- -m pkg.train --module x", "", "-m pkg.train --module x"),
        ("--standalone --nnodes 1:1 --nproc-per-node 2 --tee 3 a.py", "--nproc=2", "a.py"),
        ("--master_port 29501 --max_restarts 3 a.py", "--max_restarts 3 --port=29501", "a.py"),
        ("--master-port 29501 --standalone a.py", "", "a.py"),
        ("--shutdown-timeout 5 --local-ranks-filter 0 a.py", "--grace-period=5 --show=rank 0", "a.py"),
        ("--on slurm --nnodes 2:4 --nproc 2 a.py", "--on slurm --nproc 2 --nodes=2:4", "a.py"),
        ("--nproc 4 --nproc-per-node 4 a.py", "--nproc 4", "a.py"),
        ("--no-python ./run.sh a.py", "", "./run.sh a.py"),
    ],
)
def test_torchruns_words_become_ours(line: str, own: str, script: str) -> None:
    found = typed(line)
    assert (" ".join(found.paceline_arguments), " ".join(found.script)) == (own, script)
    assert not found.need_torchrun


def test_torchruns_variables_count_as_its_options_which_win() -> None:
    environ = {
        "PET_NPROC_PER_NODE": "4",
        "PET_STANDALONE": "1",
        "PET_NNODES": "2",
        "PET_MODULE": "0",
        "PET_RDZV_CONF": "x",
    }
    found = typed("train.py", environ)
    assert found.paceline_arguments == ["--nproc=4"] and found.script == ("train.py",)
    assert not found.need_torchrun and found.ignored_options_text.startswith("PET_RDZV_CONF: ")
    assert typed("--nproc 2 train.py", environ).paceline_arguments == ["--nproc", "2"]
    assert typed("--nproc_per_node=3 a.py", environ).paceline_arguments == ["--nproc=3"]
    assert typed("--nnodes 2 train.py", environ).need_torchrun


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--rdzv-backend c10d --rdzv-conf a=b -r3 --start-method fork --log-dir x --tee 3 a.py",
         ["--rdzv-backend, --rdzv-conf", "--redirects", "--start-method"]),
        ("--standalone --nnodes 1 --nproc-per-node 2 --tee 3 a.py", []),
        ("--local-ranks-filter 0,1 a.py", ["--local-ranks-filter"]),
    ],
)  # fmt: skip
def test_options_without_effect_are_listed_with_reasons_in_one_line(line: str, names: list[str]) -> None:
    assert re.findall(r"(?:^|; )(--[^:]+): ", typed(line).ignored_options_text) == names


@pytest.mark.parametrize(
    ("line", "code", "fields"),
    [
        ("--nproc 2 --nproc-per-node 4 a.py", "conflicting-options", {"ours": "--nproc", "name": "--nproc-per-node"}),
        ("--nproc-per-nod 4 a.py", "unknown-option", {"meant": " Did you mean --nproc-per-node?"}),
        ("--num-processes 4 a.py", "unknown-option", {"meant": " Did you mean --nproc?"}),
        ("--nproc-per-node two a.py", "torchrun-choice", {"setting": "nproc_per_node", "value": "two"}),
        ("--master-port x a.py", "torchrun-choice", {"setting": "master_port", "value": "x"}),
        ("--standalone=1 a.py", "option-takes-no-value", {"setting": "standalone"}),
        ("--nnodes 2:1 a.py", "nnodes-not-a-number", {"setting": "nnodes", "value": "2:1"}),
        ("--nnodes two a.py", "nnodes-not-a-number", {"setting": "nnodes", "value": "two"}),
        ("--standalone --nnodes 2 a.py", "standalone-with-nodes", {}),
        ("--node-rank 1 a.py", "node-rank-alone", {}),
        ("--on ssh --hosts n1,n2 --node-rank 1 a.py", "nodes-started-twice", {"launcher": "ssh"}),
        ("-m --no-python pkg", "module-with-no-python", {}),
        ("-m a/b.py", "not-a-module", {"value": "a/b.py"}),
        ("--nproc 2", "no-script", {}),
        ("--rdzv-id", "option-needs-a-value", {"setting": "rdzv_id"}),
        (f"{NODES} --show all a.py", "no-effect-under-torchrun", {"setting": "show"}),
        (f"{NODES} --port 1 a.py", "conflicting-options", {"ours": "--port", "name": "--master-port"}),
    ],
)
def test_what_contradicts_or_means_nothing_is_refused(line: str, code: str, fields: dict[str, str]) -> None:
    with raises(code, **fields):
        found = typed(line)
        assert found.script
        found.torchrun_command("python") if found.need_torchrun else found.paceline_arguments


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        (f"{NODES} --nproc 4 --hang-timeout 30 a.py --x 1", ("--nproc-per-node=4", "--hang-timeout=30", "a.py --x 1")),
        (f"{NODES} --nproc_per_node gpu -m pkg.train", ("--nproc-per-node=gpu", "", "-m pkg.train")),
        (f"{NODES} --dry-run a.py", ("", "", "a.py")),
    ],
)
def test_several_nodes_by_torchruns_words_are_torchruns_with_the_guard_in_front(
    line: str, behind: tuple[str, str, str]
) -> None:
    found = typed(line, {"PET_RUN_PATH": "1"})
    command, env = found.torchrun_command("python")
    options, guard, script = (words.split() for words in behind)
    nodes = ("--nnodes=2", "--node-rank=1", "--master-addr=n1", "--master-port=29500")
    assert found.need_torchrun and env == {"PET_RUN_PATH": "0"}
    assert command == (*RUN, *nodes, *options, "-m", "paceline", "watchover", "--end", *guard, *script)


def test_elastic_nodes_and_gpus_that_each_rank_sees_as_the_first_are_torchruns_too() -> None:
    for line in ("--nnodes 1:4 --rdzv-endpoint n1 a.py", "--virtual-local-rank a.py"):
        assert typed(line).need_torchrun
    command, env = typed("--nnodes=1:4 --threads-per-rank 2 --no-python ./run.sh").torchrun_command("python")
    assert command == (*RUN, "--nnodes=1:4", "--no-python", "./run.sh") and env == {"OMP_NUM_THREADS": "2"}


SCRIPT = 'import os, sys\nprint(os.environ["WORLD_SIZE"], *sys.argv[1:])'


def test_a_script_starts_as_it_does_under_torchrun(paceline, tmp_path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("launch", "--standalone", "--rdzv-backend=c10d", "--nproc_per_node=2", "--local-ranks-filter", 0)
    run = paceline(*words, "--log-dir", "logs", "train.py", "--nproc", 3, env={"PET_NPROC_PER_NODE": "7"})
    assert (run.returncode, run.stdout) == (0, "2 --nproc 3\n"), run.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(rf"ignored: --rdzv-backend: .*\nrun folder {folder}\n", run.stderr)
    assert folder.name.startswith("train-") and (folder / "attempt-1" / "rank-1.log").exists()
    command = paceline("launch", *NODES.split(), "--dry-run", "train.py").stdout.split()
    assert command[:2] == ["torchrun", "--nnodes=2"] and command[-4:] == ["paceline", "watchover", "--end", "train.py"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("train.py --nproc 1 --nproc_per_node=2", ["--nproc", "--nproc_per_node"]),
        ("--nproc 1 train.py --nproc 2", []),
        ("train.py --lr 1", []),
    ],
)
def test_a_number_of_processes_after_the_script_is_the_scripts_and_paceline_says_so(
    paceline, line: str, names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = paceline("launch", *line.split())
    assert run.returncode == 0, run.stderr
    assert re.findall(r"--nproc\w*", run.stderr) == names
