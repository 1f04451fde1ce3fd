"""Each check names what is wrong, where, and what to do; nothing is found on a healthy set."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest
from tests.doctor.surveys import HOSTS, facts, gpu, survey

from paceline.doctor.messages import Disk, Done, File, Files, LinkSpeed, Rehearsed
from paceline.doctor.report import run_checks
from paceline.doctor.survey import rounds
from paceline.host.compare import compare_hosts
from paceline.host.facts import Address, Limit
from paceline.mesh import Mesh

PAIRS = list(permutations(HOSTS, 2))
ADDRESS = {host: f"10.77.0.{host[1:]}" for host in HOSTS}


def found(**changes: Any) -> list[tuple[str, str, str, str]]:
    """(check, severity, host, words) of all findings of a spoiled set."""
    return [
        (check.name, finding.severity, finding.host, f"{finding.what} -> {finding.remedy}")
        for check in run_checks(survey(**changes))
        for finding in check.findings
    ]


def reach(closed: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], dict[str, str]]:
    return {pair: {ADDRESS[pair[1]]: closed.get(pair, "ok")} for pair in PAIRS}


def link(slow: float, *pairs: tuple[str, str]) -> dict[tuple[str, str], LinkSpeed]:
    return {pair: LinkSpeed("ok", 1e-4, slow if pair in pairs else 1.2e9) for pair in PAIRS}


def test_a_healthy_set_has_no_finding() -> None:
    checks = [*run_checks(survey())]
    assert [check.verdict for check in checks] == ["ok"] * 13, checks
    assert all(check.summary for check in checks)


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, str, str], str]] = {
    "a lost host": ({"lost": {"n2": "gone"}}, ("hosts", "error", "n2"), "gone"),
    "the same machine twice": (
        {
            "facts": {"n3": {"host": "n1", "addresses": (Address("eth0", "10.77.0.1", 24),)}},
            "resolved": {host: dict.fromkeys(("n1", "n3"), ("10.77.0.1",)) | {"n2": ("10.77.0.2",)} for host in HOSTS},
        },
        ("hosts", "warning", "n3"),
        "same machine as n1",
    ),
    "another Python": ({"facts": {"n2": {"python": "3.12.1"}}}, ("software", "error", "n2"), "Python is 3.12.1"),
    "another patch of Python": ({"facts": {"n2": {"python": "3.11.9"}}}, ("software", "warning", "n2"), "3.11.7 on n1"),
    "other code": ({"facts": {"n3": {"source": "bbb"}}}, ("software", "error", "n3"), "code is bbb"),
    "a missing package": (
        {"facts": {"n1": {"packages": {"paceline": "0.1.0", "torch": "2.13.0"}}}},
        ("software", "warning", "n1"),
        "numpy is missing",
    ),
    "fewer cores": ({"facts": {"n1": {"cores": 4}}}, ("software", "warning", "n1"), "cores is 4, but 8"),
    "oversubscription": (
        {"wanted": {"threads": 8}, "facts": {}},
        ("resources", "warning", "n1"),
        "2 workers x 8 threads = 16 on 8 cores",
    ),
    "few files": ({"facts": {"n2": {"nofile": Limit(100, 1000)}}}, ("resources", "warning", "n2"), "at most 1000"),
    "too few files": ({"facts": {"n2": {"nofile": Limit(100, 200)}}}, ("resources", "error", "n2"), "limits.conf"),
    "tiny shared memory": (
        {"facts": {"n2": {"shm_size": 1 << 20, "shm_free": 1 << 20}}},
        ("resources", "warning", "n2"),
        "--shm-size",
    ),
    "full shared memory": ({"facts": {"n2": {"shm_free": 0}}}, ("resources", "warning", "n2"), "0 MiB free"),
    "a loopback name": (
        {"facts": {"n2": {"own_addresses": ("127.0.1.1",)}}},
        ("names", "warning", "n2"),
        "write 10.77.0.2 n2",
    ),
    "a name that is not known": (
        {"resolved": {"n1": {"n1": ("10.77.0.1",), "n2": (), "n3": ("10.77.0.3",)}}},
        ("names", "warning", "n1"),
        "does not know the name n2",
    ),
    "a name of another machine": (
        {"resolved": {"n1": {"n1": ("10.77.0.1",), "n2": ("10.9.9.9",), "n3": ("10.77.0.3",)}}},
        ("names", "warning", "n1"),
        "takes n2 for 10.9.9.9",
    ),
    "a closed way": (
        {"reach": reach({("n1", "n2"): "filtered"})},
        ("network", "error", "n2"),
        "from n1 at 10.77.0.2: no answer, so a firewall drops it -> on n2 let in all TCP ports from 10.77.0.1",
    ),
    "a pair apart": (
        {"reach": reach({("n1", "n2"): "refused", ("n2", "n1"): "refused"})},
        ("network", "error", "n1, n2"),
        "firewall rejects it",
    ),
    "a host apart": (
        {"reach": reach({pair: "no route" for pair in PAIRS if "n3" in pair})},
        ("network", "error", "n3"),
        "to one network",
    ),
    "an interface that is down": (
        {"facts": {"n2": {"down": (Address("eth1", "10.88.0.2", 24),)}}},
        ("interfaces", "warning", "n2"),
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    "a clock ahead": ({"clock_offsets": {"n1": 0.0, "n2": 9.0, "n3": 0.0}}, ("clocks", "warning", "n2"), "9.0 s ahead"),
    "a clock behind": (
        {"clock_offsets": {"n1": 0.0, "n2": -9.0, "n3": 0.0}},
        ("clocks", "warning", "n2"),
        "9.0 s behind",
    ),
    "an unshared folder": (
        {"seen": {"n1": Done(True), "n2": Done(False, "No such file"), "n3": Done(True)}},
        ("run folder", "error", "n2"),
        "all hosts mount",
    ),
    "a folder that is read only": (
        {"written": Done(False, "cannot be written to"), "seen": {}},
        ("run folder", "error", "n1"),
        "another --run-dir",
    ),
    "a full disk": ({"disks": {"n3": Disk("/shared", 1 << 20, 1 << 41)}}, ("disk", "error", "n3"), "only 1.05 MB free"),
    "a nearly full disk": ({"disks": {"n3": Disk("/shared", 1 << 29, 1 << 41)}}, ("disk", "warning", "n3"), "537 MB"),
    "no room for checkpoints": (
        {
            "disks": {"n3": Disk("/shared", 2 << 30, 1 << 41)},
            "rehearsed": Rehearsed(10**8, 4 * 10**8, 10.0, 0.01, 4e10),
        },
        ("disk", "error", "n3"),
        "4 checkpoints of this task take 4.8 GB",
    ),
    "other data": (
        {"files": {h: Files((File("a", 9, "cd" * 32 if h == "n2" else "ab" * 32),)) for h in HOSTS}},
        ("data", "error", "n2"),
        "a is 9 bytes, SHA-256 cdcd",
    ),
    "missing data": (
        {"files": {h: Files((File("a", 9, "ab" * 32),) if h != "n2" else ()) for h in HOSTS}},
        ("data", "error", "n2"),
        "a is missing",
    ),
    "data that cannot be read": ({"files": {"n1": Files((), "/data: gone")}}, ("data", "error", "n1"), "/data: gone"),
    "a slow host": (
        {"links": link(1e7, *(pair for pair in PAIRS if "n3" in pair))},
        ("links", "warning", "n3"),
        "80 Mbit/s, where at least 500 Mbit/s is needed",
    ),
    "a slow link": ({"links": link(1e7, ("n1", "n2"), ("n2", "n1"))}, ("links", "warning", "n1, n2"), "between n1 and"),
    "a link far below the others": (
        {"links": link(2e8, ("n1", "n2"))},
        ("links", "warning", "n1, n2"),
        "1.6 Gbit/s, most others 9.6 Gbit/s",
    ),
    "a rehearsal that failed": ({"rehearsed": Rehearsed(why="boom")}, ("all-reduce", "error", "n1, n2 and n3"), "boom"),
    "a GPU that is slower than the others": (
        {
            "wanted": {"workers": (1, 2, 1)},
            "rehearsed": Rehearsed(1_200_000, 4_800_000, 0.1, 0.01, 4.8e8, "cuda (H100)", (0.1, 0.11, 0.2, 0.1)),
        },
        ("all-reduce", "warning", "n2"),
        "the GPU of rank 2 takes 200 ms for a step, others 100 ms",
    ),
    "a network that costs most of a step": (
        {"rehearsed": Rehearsed(1_200_000, 4_800_000, 0.1, 0.3, 1.6e7)},
        ("all-reduce", "warning", "n1, n2 and n3"),
        "at most 75% of a step",
    ),
    "layers that hosts share": (
        {
            "wanted": {"mesh": Mesh.parse("data=2,tensor=3")},
            "rehearsed": Rehearsed(1_200_000, 4_800_000, 0.1, 0.01, 4.8e8, tensor_bytes=90_000_000),
        },
        ("mesh", "warning", "n1 and n2"),
        "ranks 0, 1, 2 share layers along tensor, and each sends 120 MB of sums in a step: at least 100 ms at "
        "9.6 Gbit/s, beside 100 ms -> let tensor divide the 2 workers of a host",
    ),
    "a busy GPU": (
        {"facts": {h: {"gpus": (gpu(0), gpu(1, processes=(77,) if h == "n2" else ()))} for h in HOSTS}},
        ("gpus", "warning", "n2"),
        "GPU 1 is in use by pid 77",
    ),
    "a GPU with errors": (
        {"facts": {h: {"gpus": (gpu(0, ecc_errors=3 if h == "n2" else 0), gpu(1))} for h in HOSTS}},
        ("gpus", "error", "n2"),
        "3 memory errors",
    ),
    "another driver": (
        {"facts": {h: {"gpus": (gpu(0, driver="535" if h == "n2" else "550"), gpu(1))} for h in HOSTS}},
        ("software", "warning", "n2"),
        "driver is 535",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_host_and_a_remedy(name: str) -> None:
    changes, expected, words = FAULTS[name]
    findings = found(**changes)
    assert [finding[:3] for finding in findings if finding[:3] == expected], findings
    assert any(words in finding[3] for finding in findings if finding[:3] == expected), findings
    others = {finding[:2] for finding in findings} - {expected[:2]}
    assert not others, "only this one is to be found"
    assert all(not finding[3].endswith("-> ") for finding in findings)


def test_a_mesh_whose_layers_are_shared_within_hosts_is_well() -> None:
    checks = run_checks(survey(wanted={"mesh": Mesh.parse("data=3,tensor=2")}))
    told = next(check for check in checks if check.name == "mesh")
    assert (told.verdict, told.summary) == ("ok", "data=3,tensor=2; ranks along tensor share a host")


def test_more_workers_than_gpus_are_an_error_on_each_host() -> None:
    findings = found(facts={host: {"gpus": (gpu(0),)} for host in HOSTS})
    assert [finding[:3] for finding in findings] == [("gpus", "error", host) for host in HOSTS]
    assert "--nproc 1" in findings[0][3]


def test_a_dead_interface_is_told_by_the_neighbours_that_do_not_reach_it() -> None:
    second = {host: (Address("eth0", ADDRESS[host], 24), Address("eth1", f"10.88.0.{host[1:]}", 24)) for host in HOSTS}
    tries = {(a, b): {ADDRESS[b]: "ok", f"10.88.0.{b[1:]}": "filtered" if "n2" in (a, b) else "ok"} for a, b in PAIRS}
    findings = found(facts={host: {"addresses": second[host]} for host in HOSTS}, reach=tries)
    assert {finding[:2] for finding in findings} == {("interfaces", "warning")}
    assert any("eth1 (10.88.0.2) does not reach n1 and n3" in finding[3] for finding in findings)


def test_a_bridge_with_the_same_address_on_every_host_is_no_common_network() -> None:
    bridge = {host: (Address("eth0", ADDRESS[host], 24), Address("docker0", "172.17.0.1", 16)) for host in HOSTS}
    tries = {(a, b): {ADDRESS[b]: "ok", "172.17.0.1": "refused"} for a, b in PAIRS}
    assert found(facts={host: {"addresses": bridge[host]} for host in HOSTS}, reach=tries) == []


def test_the_interface_that_the_hosts_name_means_is_preferred() -> None:
    second = (Address("eth0", "10.77.0.2", 24), Address("ib0", "10.88.0.2", 24))
    changes = {"n2": {"addresses": second, "own_addresses": ("10.88.0.2",)}}
    tries = {(a, b): {ADDRESS[b]: "ok"} | ({"10.88.0.2": "ok"} if b == "n2" else {}) for a, b in PAIRS}
    changed = survey(facts=changes, reach=tries)
    told = next(check.summary for check in run_checks(changed) if check.name == "interfaces")
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0 (n2 10.88.0.2)" in told


@pytest.mark.parametrize("count", range(2, 9))
def test_every_way_is_measured_once_and_no_host_twice_at_a_time(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    every = list(rounds(names))
    for pairs in every:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    assert sorted(pair for pairs in every for pair in pairs) == sorted(permutations(names, 2))


def test_of_hosts_that_differ_without_a_majority_all_are_named() -> None:
    hosts = {"n1": facts("n1"), "n2": facts("n2", python="3.12.0")}
    findings = compare_hosts(hosts, dict.fromkeys(hosts, 1), 0)
    assert [(finding.severity, finding.host) for finding in findings] == [("error", "n1, n2")]
    assert "3.11.7 on n1, 3.12.0 on n2" in findings[0].what
