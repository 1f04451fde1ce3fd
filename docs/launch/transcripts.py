"""Types the commands of these pages on real hosts, and writes what came out into the pages.

`make transcripts`, or `python docs/launch/transcripts.py [NAME ...]`; as root, with what `.ci/install` installs. A page
has `<!-- transcript NAME -->` before each block that is made here. The rest of a page is written by people.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from stage import LONGEST_SECONDS, Stage, start  # noqa: E402 - lies beside this file

BLOCK = r"(<!-- transcript {} -->\n+```text\n).*?(^```$)"
TRAIN = "paceline train mnist-cnn --steps 100 --batch-size 16 --strategy exact --virtual-ranks 4"
# Long enough for something to happen to it.
LONG = "paceline train mnist-cnn --steps 400 --batch-size 4 --strategy exact --virtual-ranks 4 --checkpoint-every 50"
NIC = "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --oversubscribe"

# page -> transcript -> what is typed on n1, one line after the other
TYPED: dict[str, dict[str, tuple[str, ...]]] = {
    "local": {
        "local": (f"{TRAIN} --nproc 2 --run-dir runs/local", "grep weights runs/local/summary.json"),
        "local-script": (
            "paceline launch --nproc 2 -- existing_ddp.py --data mnist --epochs 2",
            "cat bad.py",
            "paceline launch --nproc 4 --run-dir runs/bad -- bad.py",
        ),
    },
    "ssh": {
        "ssh": (
            f"{TRAIN} --on ssh --hosts n1,n2 --nproc 2 --run-dir runs/ssh",
            "grep weights runs/ssh/summary.json",
            "ls runs/ssh runs/ssh/*-1",
        ),
    },
    "slurm": {
        "slurm": (
            f"{TRAIN} --on slurm --nodes 2 --nproc 2 --time 10 --follow --run-dir runs/slurm",
            "grep weights runs/slurm/summary.json",
        ),
        "slurm-script": ("cat runs/slurm/submit-1/job.sbatch",),
        "slurm-refused": (
            "paceline train mnist-cnn --on slurm --nodes 5 --nproc 2",
            "paceline train mnist-cnn --on slurm --nodes 2 --nproc 2 --partition gpx",
            "paceline train mnist-cnn --on slurm --nodes 2 --nproc 2 --time 90",
            "paceline train mnist-cnn --on slurm --nodes 2 --nproc 2 --sbatch array=0-3",
        ),
        "slurm-salloc": (
            f"salloc -Q -N2 -c2 --ntasks-per-node=1 {TRAIN} --on slurm --nodes 2 --nproc 2 --run-dir runs/salloc",
        ),
    },
    "by-hand": {
        "srun": (
            f"srun -N2 --ntasks-per-node=2 {TRAIN} --run-dir runs/srun",
            "grep weights runs/srun/summary.json",
        ),
        "mpirun": (
            f"mpirun {NIC} --host n1:2,n2:2 -x PATH {TRAIN} 2>&1 | grep -m1 paceline:",
            f"mpirun {NIC} --host n1:2,n2:2 -x PATH -x MASTER_ADDR=n1 {TRAIN} --run-dir runs/mpi",
            "grep weights runs/mpi/summary.json",
        ),
    },
}


def local_detached(stage: Stage) -> None:
    """A run without its shell, cancelled, and gone on with."""
    stage.type("n1", f"{LONG} --nproc 2 --run-dir runs/away --detach")
    stage.wait_for_step("away", 120)
    stage.type("n1", "paceline status runs/away")
    stage.type("n1", "paceline cancel runs/away")
    stage.type("n1", "paceline train --resume auto --run-dir runs/away --nproc 1")


def ssh_refused(stage: Stage) -> None:
    """Hosts that cannot be used, each for another reason."""
    stage.lab.deny("n3", "n1")
    stage.type("n1", "paceline train mnist-cnn --on ssh --hosts n1,n2:23,n3,n9 --nproc 2 --run-dir runs/refused")
    stage.lab.clear("n3")


def ssh_lost(stage: Stage) -> None:
    """A host that is switched off."""
    line = f"{LONG} --on ssh --hosts n1,n2 --nodes 1:2 --nproc 2 --run-dir runs/lost"
    run = stage.begin("n1", line)
    stage.wait_for_step("lost", 120)
    stage.lab.power_off("n2")
    stage.note("after step 120 of this run n2 is switched off")
    stage.end("n1", line, run)
    stage.type("n1", "paceline ledger runs/lost")
    stage.lab.boot("n2")


def slurm_again(stage: Stage) -> None:
    """A job whose time is nearly over."""
    stage.type("n1", f"{LONG} --on slurm --nodes 2 --nproc 2 --time 10 --run-dir runs/again")
    stage.wait_for_step("again", 120)
    job = json.loads((stage.project / "runs/again/submit-1/submitted.json").read_text())["slurm_job"]
    stage.type("n1", "paceline status runs/again")
    stage.type("n1", f"scancel --batch --signal=USR1 {job}  # what Slurm does --save-before the time limit")
    stage.type("n1", "paceline logs runs/again --follow")
    stage.type("n1", "paceline status runs/again")
    stage.type("n1", "paceline ledger runs/again")


def by_hand(stage: Stage) -> None:
    """torchrun's commands."""
    _print_and_type(stage, f"{TRAIN} --on print --hosts n1,n2 --nproc 2 --run-dir runs/torchrun")
    stage.type("n1", "grep weights runs/torchrun/summary.json")


def by_hand_agents(stage: Stage) -> None:
    """Our agent's."""
    _print_and_type(stage, f"{TRAIN} --on print --agent paceline --hosts n1,n2 --nproc 2 --run-dir runs/agents")
    stage.type("n1", "grep weights runs/agents/summary.json")


def by_hand_alone(stage: Stage) -> None:
    """A node that nobody joins."""
    line = f"{TRAIN} --on print --agent paceline --hosts n1,n2 --nproc 2 --join-timeout 15 --run-dir runs/alone"
    printed = stage.begin("n1", line).communicate(timeout=LONGEST_SECONDS)[0]
    words = _lines(printed)[1]
    stage.end("n2", words, stage.begin("n2", words), show=f"{words[:70]}...")


def _print_and_type(stage: Stage, line: str) -> None:
    typed = _lines(stage.type("n1", line))
    started = [stage.begin(host, words) for host, words in zip(("n1", "n2"), typed, strict=True)]
    for host, words, process in zip(("n1", "n2"), typed, started, strict=True):
        stage.end(host, words, process, show=f"{words[:70]}...")


def _lines(printed: str) -> list[str]:
    """The lines for people to type: not the comments."""
    return [line for line in printed.splitlines() if re.match(r"(PACELINE_RUN_ID=|/home)", line)]


EVENTFUL: dict[str, dict[str, Callable[[Stage], None]]] = {
    "local": {"local-detached": local_detached},
    "ssh": {"ssh-refused": ssh_refused, "ssh-lost": ssh_lost},
    "slurm": {"slurm-again": slurm_again},
    "by-hand": {"by-hand": by_hand, "by-hand-agents": by_hand_agents, "by-hand-alone": by_hand_alone},
}


def play(stage: Stage, page: str, name: str) -> None:
    """Make one transcript and put it into its block of the page."""
    stage.said = []
    if name in EVENTFUL[page]:
        EVENTFUL[page][name](stage)
    else:
        for line in TYPED[page][name]:
            stage.type("n1", line)
    body = re.sub(r"[ \t]+$", "", "\n".join(stage.said), flags=re.MULTILINE)
    path = HERE / f"{page}.md"
    flags = re.DOTALL | re.MULTILINE
    text, count = re.subn(BLOCK.format(name), lambda found: found[1] + body + found[2], path.read_text(), flags=flags)
    if count != 1:
        raise SystemExit(f"{path.name} has {count} blocks for the transcript {name}")
    path.write_text(text)
    print(f"{path.name}: {name}", flush=True)


def main(asked: list[str]) -> None:
    """Make the transcripts that are asked for, or all."""
    pages = {name: page for page in TYPED for name in (*TYPED[page], *EVENTFUL[page])}
    if unknown := set(asked) - set(pages):
        raise SystemExit(f"no transcript {', '.join(unknown)}. Choose from: {', '.join(pages)}")
    with tempfile.TemporaryDirectory() as base:
        stage = start(Path(base))
        try:
            for name in asked or pages:
                play(stage, pages[name], name)
        finally:
            stage.lab.close()


if __name__ == "__main__":
    main(sys.argv[1:])
