"""Injected faults are named, with the right host and a remedy; nothing is, where all is well (real hosts, real ssh)."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm
from tests.cluster.ssh import SshHosts

pytestmark = pytest.mark.sample(2)

DOCTOR = (sys.executable, "-m", "paceline", "doctor")
Doctor = Callable[..., "Report"]


@dataclass(frozen=True)
class Report:
    """What `paceline doctor --json` said."""

    code: int
    seconds: float
    content: Mapping[str, Any]

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """(check, severity, host) of all findings."""
        return [
            (check["name"], finding["severity"], finding["host"])
            for check in self.content["checks"]
            for finding in check["findings"]
        ]

    @property
    def words(self) -> str:
        return " | ".join(f["what"] + " -> " + f["remedy"] for c in self.content["checks"] for f in c["findings"])

    def summary(self, name: str) -> str:
        return next(check["summary"] for check in self.content["checks"] if check["name"] == name)


@pytest.fixture
def doctor(lab: Lab, ssh_hosts: SshHosts, tmp_path: Path) -> Doctor:
    """Run it on n1. `on_host` are shell lines that precede Python on one host: a limit, a variable, another clock."""

    def run(*options: str, hosts: str = "n1,n2", on_host: Mapping[str, str] | None = None) -> Report:
        python = tmp_path / "python"
        cases = "\n".join(f"{host}) {lines};;" for host, lines in (on_host or {}).items())
        python.write_text(f'#!/bin/sh\ncase $(uname -n) in\n{cases}\nesac\nexec $run {sys.executable} "$@"\n')
        python.chmod(0o700)
        ssh = ("--on", "ssh", "--ssh", ssh_hosts.command, "--hosts", hosts, "--python", str(python))
        folder = () if "--run-dir" in options else ("--run-dir", str(tmp_path / "runs"))
        done = lab.run("n1", *DOCTOR, *ssh, *folder, "--json", *options, cwd=tmp_path)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        content = json.loads(done.stdout)
        return Report(done.returncode, content["seconds"], content)

    return run


def test_a_healthy_set_of_hosts_has_no_finding_and_takes_seconds(doctor: Doctor) -> None:
    report = doctor("--nproc", "1")
    assert report.findings == [], report.words
    assert report.code == 0
    assert "n2 10.77.0.2 (eth0)" in report.summary("ports")
    assert report.content["bandwidth"]["bytes_per_second"] > 1e6
    assert 0 < report.content["bandwidth"]["round_trip_seconds"] < 1
    assert report.seconds < 20  # 1 on a machine that does nothing else


def test_the_quick_part_takes_two_seconds_on_four_hosts(doctor: Doctor) -> None:
    report = doctor("--quick", hosts="n1,n2,n3,n4")
    assert report.findings == [], report.words
    assert len(report.content["ports"]) == 12
    assert report.seconds < 6


def test_a_firewall_in_one_direction_is_named_with_the_direction(doctor: Doctor, lab: Lab) -> None:
    rules = "add table ip lab; add chain ip lab in { type filter hook input priority 0 ; }; add rule ip lab in "
    lab.run("n3", "nft", rules + "ip saddr 10.77.0.1 tcp dport 1024-65535 ct state new drop")
    try:
        report = doctor("--quick", hosts="n1,n2,n3")
    finally:
        lab.clear("n3")
    assert report.findings == [("ports", "error", "n3")]
    assert "from n1 at 10.77.0.3" in report.words
    assert report.code == 1


@pytest.mark.slow
def test_a_pair_that_a_firewall_keeps_apart_is_named(doctor: Doctor, lab: Lab) -> None:
    lab.deny("n3", from_="n2", ports="1024-65535")  # and so the answers to n3's own connections
    report = doctor("--quick", hosts="n1,n2,n3")
    assert report.findings == [("ports", "error", "n2"), ("ports", "error", "n3")]


def test_a_host_name_that_means_loopback_is_named(doctor: Doctor, lab: Lab) -> None:
    lab.names("n2", "127.0.1.1 n2")
    report = doctor("--quick")
    assert report.findings == [("names", "warning", "n2")]
    assert "127.0.1.1" in report.words
    assert "write 10.77.0.2 n2" in report.words


@pytest.mark.slow
def test_a_slow_link_is_named(doctor: Doctor, lab: Lab) -> None:
    lab.rate("n3", "100mbit")
    report = doctor(hosts="n1,n2,n3")
    assert report.findings == [("bandwidth", "warning", "n2"), ("bandwidth", "warning", "n3")]
    assert "Mbit/s to n3" in report.words and "Mbit/s to n1" in report.words


def test_two_good_interfaces_are_no_finding(doctor: Doctor, lab: Lab) -> None:
    for host, address in (("n1", "10.88.0.1"), ("n2", "10.88.0.2")):
        lab.add_nic(host, "eth1", address)
    assert doctor("--quick").findings == []


@pytest.mark.parametrize("state", ["up", "down"])
def test_a_bridge_that_each_host_has_for_itself_is_no_finding(doctor: Doctor, lab: Lab, state: str) -> None:
    for host in ("n1", "n2"):
        lab.run(host, "ip", "link", "add", "docker0", "type", "bridge")
        lab.run(host, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        lab.run(host, "ip", "link", "set", "docker0", state)
    try:
        report = doctor("--quick")
    finally:
        for host in ("n1", "n2"):
            lab.run(host, "ip", "link", "del", "docker0")
    assert report.findings == [], report.words


def test_an_unshared_run_folder_is_named(doctor: Doctor, lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    lab.hide("n2", tmp_path / "shared")
    report = doctor("--quick", "--run-dir", str(tmp_path / "shared" / "run"))
    assert report.findings == [("run folder", "error", "n2")]
    assert list((tmp_path / "shared").iterdir()) == []  # the probe is gone again


def test_a_full_disk_is_named(doctor: Doctor, lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    lab.small("n2", tmp_path / "full", "8m")
    report = doctor("--quick", "--run-dir", str(tmp_path / "full" / "run"))
    assert ("disk", "error", "n2") in report.findings
    assert f"{tmp_path}/full" in report.words


def test_a_small_shared_memory_is_named(doctor: Doctor, lab: Lab) -> None:
    lab.small("n2", "/dev/shm", "16m")
    report = doctor("--quick")
    assert report.findings == [("resources", "warning", "n2")]
    assert "--shm-size" in report.words


def test_another_version_of_a_package_is_named(doctor: Doctor, tmp_path: Path) -> None:
    fake = tmp_path / "other" / "torch-2.12.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    report = doctor("--quick", hosts="n1,n2,n3", on_host={"n3": f"export PYTHONPATH={fake.parent}:$PYTHONPATH"})
    assert report.findings == [("software", "error", "n3")]
    assert "torch is 2.12.1" in report.words
    assert report.code == 1


def test_other_code_of_paceline_is_named(doctor: Doctor, tmp_path: Path) -> None:
    import paceline

    copy = tmp_path / "copy" / "paceline"
    shutil.copytree(Path(str(paceline.__file__)).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "mnist"))
    with (copy / "seeding.py").open("a") as file:
        file.write("# changed\n")
    report = doctor("--quick", hosts="n1,n2,n3", on_host={"n2": f"export PYTHONPATH={copy.parent}:$PYTHONPATH"})
    assert report.findings == [("software", "error", "n2")]
    assert "code" in report.words


@pytest.mark.slow
def test_of_two_hosts_that_differ_both_are_named(doctor: Doctor, tmp_path: Path) -> None:
    fake = tmp_path / "other" / "numpy-1.26.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.0\n")
    report = doctor("--quick", on_host={"n2": f"export PYTHONPATH={fake.parent}:$PYTHONPATH"})
    assert report.findings == [("software", "warning", "n1, n2")]


@pytest.mark.needs("faketime")
def test_a_clock_that_is_wrong_is_named(doctor: Doctor) -> None:
    report = doctor("--quick", on_host={"n2": "run='faketime -f +20s'"})
    assert report.findings == [("clocks", "warning", "n2")]
    assert "20.0 s ahead" in report.words
    assert "timedatectl" in report.words


def test_few_open_files_are_named(doctor: Doctor) -> None:
    report = doctor("--quick", on_host={"n2": "ulimit -n 1000"})
    assert report.findings == [("resources", "warning", "n2")]
    assert "at most 1000 files" in report.words


def test_oversubscribed_cores_are_named(doctor: Doctor) -> None:
    report = doctor("--quick", "--nproc", "2", on_host={"n2": "run='taskset -c 0'"})
    assert ("resources", "warning", "n2") in report.findings
    assert "use --nproc 1" in report.words


@pytest.mark.slow
def test_hosts_that_do_not_answer_are_all_named_at_once(doctor: Doctor, lab: Lab) -> None:
    lab.power_off("n4")
    report = doctor("--quick", hosts="n1,n4,n9")
    assert [f for f in report.findings if f[0] == "hosts"] == [("hosts", "error", "n4"), ("hosts", "error", "n9")]
    assert report.code == 1
    assert "cannot be resolved" in report.words


def test_on_slurm_it_checks_the_nodes_of_an_allocation_of_its_own(slurm: Slurm, tmp_path: Path) -> None:
    options = ("--on", "slurm", "--nodes", "2", "--run-dir", str(tmp_path / "runs"), "--quick", "--json")
    done = slurm.run(*DOCTOR, *options, cwd=tmp_path)
    content = json.loads(done.stdout)
    assert [f for check in content["checks"] for f in check["findings"]] == [], done.stdout
    assert done.returncode == 0
    assert len(content["facts"]) == 2
