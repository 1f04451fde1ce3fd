"""torchrun's variables: all that it sets, with its values, also after a restart and on several nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.agent.nodes_harness import several

from paceline.launch.agent.workers import worker_environment
from paceline.protocol.job import NodePlan

pytestmark = pytest.mark.sample(2)

WRITES = "(folder / f'env-{generation}-{rank}').write_text(__import__('json').dumps(dict(os.environ)))\n"
DIFFER = {  # docs/torchrun.md has the reasons
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": None,
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_ERROR_FILE": None,
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def environments(folder: Path, generation: int = 0) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob(f"env-{generation}-*"))]


def test_all_that_torchrun_sets_with_its_values(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import json, os, sys\n"
        "with open(sys.argv[1] + '-' + os.environ['RANK'], 'w') as file: json.dump(dict(os.environ), file)\n"
    )
    words = ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-id=job", "--role=trainer", "script.py"]
    for name, through in {"theirs": ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
                          "ours": ["paceline", "launch"]}.items():  # fmt: skip
        command = [sys.executable, "-P", "-m", *through, *words, name]
        subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    for rank in range(2):
        theirs, ours = (json.loads((tmp_path / f"{name}-{rank}").read_text()) for name in ("theirs", "ours"))
        set_by_it = {name: value for name, value in theirs.items() if not name.startswith("PACELINE_")}
        differ = {name: ours.get(name, "") for name, value in set_by_it.items() if ours.get(name) != value}
        assert differ == {name: ours.get(name, "") if one is None else one for name, one in DIFFER.items()}
        assert theirs["TORCHELASTIC_ERROR_FILE"] and Path(ours["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()
        assert ours["TORCHELASTIC_RUN_ID"]  # by which torch's `is_torchelastic_launched` knows it


def test_a_restart_is_counted(launch) -> None:
    code = f"generation = spec.generation\n{WRITES}ready()\nif not generation: os.kill(os.getpid(), 9)"
    one = launch(code, nproc=1, plain_store=True, max_restarts=3)
    assert one.finish() == 0
    told = [(env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"])
            for generation in range(2) for env in environments(one.folder, generation)]  # fmt: skip
    assert told == [("0", "3"), ("1", "3")]


def test_of_several_nodes_each_is_a_group(tmp_path: Path) -> None:
    with several(tmp_path, f"{WRITES}", nodes=2, nproc=2, plain_store=True, role="r", rdzv_id="x") as run:
        run.start(0, 1)
        assert run.codes() == [0, 0], run.said(0)
    found = environments(tmp_path)
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    assert [[env[name] for name in names] for env in found] == [
        [str(rank // 2), "2", "r", str(rank), "4", "x"] for rank in range(4)
    ]


def test_a_lost_node_leaves_no_gap_between_groups(tmp_path: Path) -> None:
    """The first start ends with node 1; node 2 is group 1 of 2 then, and no restart is counted for it."""
    code = (
        f"generation = spec.generation\nassert spec.min_nodes == 2\n{WRITES}ready()\n"
        "if not generation:\n    while len(list(folder.glob('ready-*'))) < 3: time.sleep(0.02)\n"
        "    if rank == 1: os.kill(spec.agent_pid, 9)\n    time.sleep(600)"
    )
    with several(tmp_path, code, nodes=3, nproc=1, min_nodes=2, plain_store=True, max_restarts=1) as run:
        run.start(0, 1, 2)
        codes = run.codes(60.0)
        assert codes[0] == codes[2] == 0, run.said(0)
    names = ("RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    assert [[env[name] for name in names] for env in environments(tmp_path, 1)] == [
        ["0", "0", "2", "2", "0"],
        ["1", "1", "2", "2", "0"],
    ]


def test_an_outer_launchers_words_do_not_reach_a_script() -> None:
    outer = {"TORCHELASTIC_RESTART_COUNT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "9"}
    before = dict(os.environ)
    os.environ.update(outer)
    try:
        env = worker_environment(NodePlan(("x",), 1, attempt_dir="/a"), 0, 1)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert [env[name] for name in outer] == ["0", "False", "0"]
