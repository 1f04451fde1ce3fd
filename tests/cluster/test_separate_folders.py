"""Two ssh hosts without a shared file system: the run folder of node 0 is complete, and any hosts resume from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lab import Lab
from tests.cluster.soak_hosts import TASK as SLOW_TASK
from tests.cluster.ssh import SshHosts
from tests.cluster.training import (
    PACELINE,
    clean_ledger,
    events,
    resumed_after,
    trained_here,
    wait_for_checkpoint,
    wait_for_step,
    weights,
    words,
)
from tests.launch.launch_harness import wait_until

STEPS = 40
HOW = ("--steps", STEPS, "--batch-size", 4, "--strategy", "zero", "--virtual-ranks", 4, "--device", "cpu")


class SeparateHosts:
    """n2 is node 0, and shares its folder with n1, where the command is typed. n3 has its own disk."""

    def __init__(self, lab: Lab, ssh: SshHosts, folder: Path) -> None:
        self.lab, self.ssh, self.folder = lab, ssh, folder
        self.disk, self.run_dir, self.script = folder / "disk", folder / "disk" / "run", folder / "task.py"
        self.how: tuple[object, ...] = HOW
        self.run: subprocess.Popen[str] | None = None
        self.disk.mkdir()
        self.script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.05"))

    def command(self, *more: object, hosts: str = "n2,n3") -> list[str]:
        where = words("--on", "ssh", "--hosts", hosts, "--nproc", 1, "--ssh", self.ssh.command)
        return [
            *PACELINE, "train", f"{self.script}:task", *words(*self.how, *more), *where, "--run-dir", str(self.run_dir),
        ]  # fmt: skip

    def start(self, *more: object, hosts: str = "n2,n3", typed_on: str = "n1") -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.run = self.lab.popen(typed_on, *self.command(*more, hosts=hosts), cwd=self.folder, **pipes)
        return self.run

    def train(self, *more: object, hosts: str = "n2,n3", typed_on: str = "n1", code: int = 0) -> str:
        run = self.start(*more, hosts=hosts, typed_on=typed_on)
        said = run.communicate(timeout=240)[0]
        assert run.returncode == code, said
        return said

    def events(self) -> list[dict[str, Any]]:
        shown = self.lab.run("n2", "cat", self.run_dir / "events-0.jsonl").stdout
        return [json.loads(line) for line in shown.splitlines() if line.endswith("}")]

    def seen_on(self, host: str, *path: str) -> list[str]:
        return sorted(self.lab.run(host, "ls", "-A", self.run_dir.joinpath(*path)).stdout.split())


@pytest.fixture
def hosts(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[SeparateHosts]:
    made = SeparateHosts(lab, ssh_hosts, tmp_path)
    lab.hide("n3", made.disk)
    yield made
    if made.run is not None:
        made.run.kill()
        made.run.communicate(timeout=60)


@pytest.fixture
def expected(hosts: SeparateHosts) -> str:
    return trained_here(words("train", f"{hosts.script}:task", *HOW), hosts.folder / "expected", 60)


@pytest.mark.slow
def test_node_0_has_the_whole_run_and_a_second_node_its_checkpoints(hosts: SeparateHosts, expected: str) -> None:
    hosts.train("--checkpoint-every", 8, "--keep-checkpoints", 2)
    assert weights(hosts.run_dir) == expected
    clean_ledger(hosts.run_dir)
    kept = [f"step-{step:08d}" for step in (32, 40)]
    for host in ("n2", "n3"):
        seen = [name for name in hosts.seen_on(host, "checkpoints") if name != ".fence"]
        assert (seen if host == "n2" else seen[-2:]) == kept  # node 0 may remove one after the last look of the other
        assert hosts.seen_on(host, "checkpoints", kept[0]) == [
            "manifest.json", "shard-0-of-2.safetensors", "shard-1-of-2.safetensors",
        ]  # fmt: skip
    copy = hosts.lab.run("n3", *PACELINE, "checkpoint", "verify", str(hosts.run_dir), cwd=hosts.folder)
    assert copy.returncode == 0, copy.stderr
    assert "rank-1.log" in hosts.seen_on("n2", "attempt-1") and "machine-1.jsonl" in hosts.seen_on("n2")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("then", ["the same", "node 0", "empty disks", "the second node"])
def test_a_killed_run_resumes_on_any_hosts(lab: Lab, hosts: SeparateHosts, expected: str, then: str) -> None:
    run = hosts.start("--checkpoint-every", 5)
    wait_for_checkpoint(hosts.run_dir)
    wait_for_step(hosts.run_dir, 17)
    if then in ("the same", "the second node"):  # the whole run, with its launcher
        for pid in [pid for host in ("n1", "n2", "n3") for pid in lab.processes(host)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=60)
    else:
        lab.kill("n3")  # with the memory that is its disk
        run.communicate(timeout=60)
        assert run.returncode == 1
        lab.boot("n3")
    if then == "the second node":
        lab.hide("n2", hosts.disk)
        lab.hide("n1", hosts.disk)
        on_n3 = hosts.command("--resume", "auto", hosts="n3")
        done = lab.run("n3", *on_n3, cwd=hosts.folder, timeout=240)
        assert done.returncode == 0, done.stderr
        digest = lab.run("n3", "cat", hosts.run_dir / "summary.json").stdout
        assert f'"weights_sha256": "{expected}"' in digest
        return
    targets = "n2" if then == "node 0" else "n2,n3"
    if then == "empty disks":  # n4 keeps no copy: it gets what its rank requests
        for host in ("n3", "n4"):
            lab.hide(host, hosts.disk)
        targets = "n2,n3,n4"
    hosts.train("--resume", "auto", "--checkpoint-every", 5, hosts=targets)
    assert resumed_after(hosts.run_dir) >= 5
    assert weights(hosts.run_dir) == expected
    clean_ledger(hosts.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["n2", "n3"])
def test_no_space_for_checkpoints_is_an_error_before_the_first_step(lab: Lab, hosts: SeparateHosts, host: str) -> None:
    lab.small(host, hosts.disk, "512k")
    said = hosts.train("--checkpoint-every", 5, "--keep-checkpoints", 100, typed_on="n2", code=2)
    assert "no-space-for-checkpoints" in said and host in said


LARGE = """
class Model(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.frozen = nn.Parameter(torch.arange(500_000.0), requires_grad=False)
"""


@pytest.mark.slow
def test_training_goes_on_while_a_slow_network_carries_a_shard(lab: Lab, hosts: SeparateHosts) -> None:
    text = hosts.script.read_text()
    hosts.script.write_text(
        text.replace("def model", LARGE + "\ndef model").replace("return nn.Seq", "return Model(nn.Seq", 1)
    )
    hosts.script.write_text(hosts.script.read_text().replace("nn.Linear(32, 2))", "nn.Linear(32, 2)))"))
    lab.rate("n3", "2mbit")
    hosts.train("--checkpoint-every", 20, "--no-checkpoint-epochs")  # 0: the slow node was not lost
    steps = list[int]()
    for event in events(hosts.run_dir):
        if event["kind"] == "step":
            steps.append(int(str(event["step"])))
        elif event["kind"] == "checkpointed":
            break
    assert steps[-1] >= 22  # without a transfer the ranks agree in step 21


@pytest.mark.slow
@pytest.mark.parametrize("host", ["n2", "n3"])
def test_a_full_disk_leaves_no_incomplete_checkpoint(lab: Lab, hosts: SeparateHosts, expected: str, host: str) -> None:
    hosts.script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.2"))
    lab.small(host, hosts.disk, "1m")
    run = hosts.start("--checkpoint-every", 5, "--no-checkpoint-epochs", typed_on="n2")
    wait_until(lambda: "step-00000005" in hosts.seen_on("n2", "checkpoints"), "a checkpoint on n2", 120)
    lab.run(host, "dd", "if=/dev/zero", f"of={hosts.disk}/filler", "bs=4k")
    said = run.communicate(timeout=240)[0]
    assert run.returncode == 1 and "No space left" in said, said
    lab.run(host, "rm", hosts.disk / "filler")
    verified = lab.run("n2", *PACELINE, "checkpoint", "verify", str(hosts.run_dir), cwd=hosts.folder)
    assert verified.returncode == 0, verified.stdout
    hosts.train("--resume", "auto", typed_on="n2")
    assert f'"weights_sha256": "{expected}"' in lab.run("n2", "cat", hosts.run_dir / "summary.json").stdout


@pytest.mark.slow
def test_a_run_goes_on_from_memory_without_a_lost_node(lab: Lab, hosts: SeparateHosts, expected: str) -> None:
    hosts.script.write_text(SLOW_TASK.replace("STEP_SECONDS", "0.1"))
    hosts.how = tuple("exact" if word == "zero" else word for word in HOW)  # then each snapshot is fast
    run = hosts.start("--checkpoint-every", 1000, "--nodes", "1:2", "--max-restarts", 1, "--snapshot-every", 1)
    wait_for_step(hosts.run_dir, 17)
    lab.kill("n3")
    said = run.communicate(timeout=180)[0]
    lab.boot("n3")
    assert run.returncode == 0, said
    assert resumed_after(hosts.run_dir) >= 10
    assert weights(hosts.run_dir) == expected
    clean_ledger(hosts.run_dir)


@pytest.mark.slow
def test_a_folder_with_a_newer_run_is_an_error_and_stays(lab: Lab, hosts: SeparateHosts) -> None:
    lab.run("n3", "mkdir", "-p", "-m", "700", hosts.run_dir / "attempt-3")
    assert "attempt-3" in hosts.train(code=2)
    assert hosts.seen_on("n3") == ["attempt-3"]


LOOP = """
import sys, time
import torch, paceline
from torch.utils.data import TensorDataset

x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
with paceline.session(sys.argv[1], resume=True, strategy="zero", virtual_ranks=4, seed=0, checkpoint_every=5) as s:
    model, optimizer = s.prepare(torch.nn.Linear(8, 1), lambda p: torch.optim.AdamW(p, lr=0.01))
    loader = s.loader(TensorDataset(x, x.sum(1)), global_batch=24)
    for epoch in s.epochs(4):
        for a, b in loader:
            time.sleep(0.05)
            optimizer.zero_grad()
            s.backward(torch.nn.functional.mse_loss(model(a)[:, 0], b))
            optimizer.step()
"""


@pytest.mark.slow
def test_a_killed_session_in_the_folder_of_the_launch_resumes_on_another_host(lab: Lab, hosts: SeparateHosts) -> None:
    hosts.script.write_text(LOOP)
    assert lab.run("n1", sys.executable, hosts.script, hosts.folder / "expected", cwd=hosts.folder).returncode == 0

    def launch(names: str) -> subprocess.Popen[str]:
        where = words("--on", "ssh", "--hosts", names, "--nproc", 1, "--ssh", hosts.ssh.command)
        script = words("--run-dir", hosts.run_dir, "--", hosts.script, hosts.run_dir)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        hosts.run = lab.popen("n1", *PACELINE, "launch", *where, *script, cwd=hosts.folder, **pipes)
        return hosts.run

    run = launch("n2,n3")
    wait_for_step(hosts.run_dir, 17)
    wait_for_checkpoint(hosts.run_dir)
    lab.kill("n3")  # with the memory that is its disk
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 1 and "has no shared file system" in said, said
    lab.hide("n4", hosts.disk)
    run = launch("n2,n4")
    said = run.communicate(timeout=240)[0]
    assert run.returncode == 0, said
    assert resumed_after(hosts.run_dir) >= 5
    assert weights(hosts.run_dir) == weights(hosts.folder / "expected")
    clean_ledger(hosts.run_dir)
    assert "checkpoints" in hosts.seen_on("n4")


@pytest.mark.slow
def test_a_session_names_the_host_that_does_not_see_its_folder(lab: Lab, hosts: SeparateHosts) -> None:
    hosts.script.write_text(f"from paceline import session\nsession({str(hosts.run_dir)!r})\n")
    where = words("--on", "ssh", "--hosts", "n2,n3", "--nproc", 1, "--ssh", hosts.ssh.command, "--run-dir", "logs")
    done = lab.run("n1", *PACELINE, "launch", *where, "--", str(hosts.script), cwd=hosts.folder)
    said = done.stderr + done.stdout
    assert done.returncode == 2 and "run-dir-not-visible" in said and "n3" in said, said
