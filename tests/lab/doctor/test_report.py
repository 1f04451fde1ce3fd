"""Each rule names what is wrong, on which host, and what to do; nothing is found on healthy hosts."""

from itertools import permutations
from typing import Any

import pytest
from tests.lab.doctor.surveys import HOSTS, facts, gpu, survey
from tests.rendered import rendered

from paceline.host.facts import Address, ResourceLimit, compare_hosts
from paceline.host.gpus import Gpu
from paceline.lab.doctor.host import FolderProbeAnswer, LinkMeasurement
from paceline.lab.doctor.report import RULES, hosts_in_survey, run_checks, worst_link_values

PAIRS = list(permutations(HOSTS, 2))
ADDRESS = {host: f"10.77.0.{host[1:]}" for host in HOSTS}


def found(**changes: Any) -> list[tuple[str, str, str, str]]:
    """(check, severity, host, text) of all findings of a spoiled set."""
    return [
        (check.name, finding.severity, finding.host, f"{finding.what} -> {finding.remedy}")
        for check in run_checks(survey(**changes))
        for finding in check.findings
    ]


def reach(*closed: tuple[str, str]) -> dict[tuple[str, str], dict[str, LinkMeasurement]]:
    return {(a, b): {ADDRESS[b]: LinkMeasurement("no answer" if (a, b) in closed else "")} for a, b in PAIRS}


def test_healthy_hosts_have_no_finding() -> None:
    checks = run_checks(survey())
    assert {check.name: check.status for check in checks} == dict.fromkeys(
        ("hosts", "software", "resources", "names", "ports", "clocks", "run folder", "disk", "bandwidth"), "ok"
    )
    assert all(check.summary for check in checks)


def with_gpu(changed: Gpu) -> dict[str, Any]:
    """Two GPUs on each host; on n2, `changed` replaces one."""
    gpus = {host: [gpu(0), gpu(1)] for host in HOSTS}
    gpus["n2"][changed.index] = changed
    return {"facts": {host: {"gpus": tuple(of_host)} for host, of_host in gpus.items()}}


def on(host: str, **facts: Any) -> dict[str, Any]:
    return {"facts": {host: facts}}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a lost host": ({"lost": {"n2": "gone"}}, "hosts error n2"),
    "another Python": (on("n2", python="3.12.1"), "software error n2"),
    "another patch of Python": (on("n2", python="3.11.9"), "software warning n2"),
    "another platform": (on("n2", platform="Linux arm64"), "software error n2"),
    "other code": (on("n3", source="bbb"), "software error n3"),
    "another torch": (
        on("n1", packages={"paceline": "0.1.0", "torch": "2.12.0", "numpy": "2.4.6"}), "software error n1"),
    "a missing package": (on("n1", packages={"paceline": "0.1.0", "torch": "2.13.0"}), "software warning n1"),
    "fewer cores": (on("n1", cores=4), "software warning n1"),
    "oversubscription": ({"planned": {"threads": 8}}, "resources warning n1"),
    "more workers than cores": ({"planned": {"workers": (9, 1, 1)}}, "resources warning n1"),
    "few files": (on("n2", nofile=ResourceLimit(100, 1000)), "resources warning n2"),
    "too few files": (on("n2", nofile=ResourceLimit(100, 200)), "resources error n2"),
    "tiny shared memory": (on("n2", shm_size=1 << 20, shm_free=1 << 20), "resources warning n2"),
    "full shared memory": (on("n2", shm_free=0), "resources warning n2"),
    "little lockable memory": (
        {"facts": {h: {"gpus": (gpu(0), gpu(1)), "memlock": ResourceLimit(1 << 16 if h == "n2" else -1, -1)}
                   for h in HOSTS}}, "resources warning n2"),
    "a loopback name": (on("n2", own_addresses=("127.0.1.1",)), "names warning n2"),
    "a closed way": ({"links_by_address": reach(("n1", "n2"))}, "ports error n2"),
    "a closed host": ({"links_by_address": reach(("n1", "n2"), ("n3", "n2"))}, "ports error n2"),
    "a host without an address": (
        {"links_by_address": {(a, b): {} if b == "n3" else {ADDRESS[b]: LinkMeasurement()} for a, b in PAIRS}},
        "ports error n3"),
    "a clock ahead": ({"clock_offsets": {"n1": 0.0, "n2": 9.0, "n3": 0.0}}, "clocks warning n2"),
    "a clock behind": ({"clock_offsets": {"n1": 0.0, "n2": -9.0, "n3": 0.0}}, "clocks warning n2"),
    "an unshared folder": (
        {"folder_access": {h: FolderProbeAnswer("No such file" if h == "n2" else "") for h in HOSTS}},
        "run folder error n2"),
    "a read-only folder": ({"folder_access": {"n1": FolderProbeAnswer("read-only")}}, "run folder error n1"),
    "a full disk": ({"free": {"n3": 1 << 20}}, "disk error n3"),
    "a nearly full disk": ({"free": {"n3": 1 << 29}}, "disk warning n3"),
    "a slow link": (
        {"measured_links": {("n1", "n2"): LinkMeasurement("", 1e-4, 1e7),
                            ("n2", "n3"): LinkMeasurement("", 1e-4, 1e9)}},
        "bandwidth warning n1"),
    "a busy GPU": (with_gpu(gpu(1, processes=(77,))), "gpus warning n2"),
    "a GPU whose memory is in use": (with_gpu(gpu(1, memory_used=40 << 30)), "gpus warning n2"),
    "a lost GPU": (with_gpu(gpu(0, lost="off the bus")), "gpus error n2"),
    "a GPU with errors": (with_gpu(gpu(0, ecc_errors=3)), "gpus error n2"),
    "more workers than GPUs": (with_gpu(gpu(0)) | {"planned": {"workers": (2, 3, 2)}}, "gpus error n2"),
    "another GPU": (with_gpu(gpu(0, name="V100")), "software warning n2"),
    "another driver": (with_gpu(gpu(0, driver="535")), "software warning n2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_host_and_a_remedy(name: str) -> None:
    changes, words = FAULTS[name]
    expected, findings = tuple(words.rsplit(" ", 2)), found(**changes)
    assert expected in [finding[:3] for finding in findings]
    assert {finding[:2] for finding in findings} == {expected[:2]}  # only this one is to be found
    assert all(not finding[3].endswith("-> ") for finding in findings)
    rendered(f"{host}: {text}" for *_, host, text in findings)


def test_every_rule_has_a_fault() -> None:
    unseen = set(RULES)
    for changes, *_ in FAULTS.values():
        hosts = hosts_in_survey(survey(**{key: dict(value) for key, value in changes.items()}))
        unseen -= {rule for rule in RULES for host in hosts if [*rule.findings(host)]}
    assert not unseen


def test_errors_come_before_warnings() -> None:
    checks = run_checks(
        survey(facts={"n1": {"nofile": ResourceLimit(9, 9), "shm_free": 0}, "n2": {"nofile": ResourceLimit(9, 9)}})
    )
    (check,) = (one for one in checks if one.name == "resources")
    assert [finding.severity for finding in check.findings] == ["error", "error", "warning"]
    assert check.status == "error"


def test_the_figures_are_those_of_the_slowest_link_and_the_longest_round_trip() -> None:
    links = {("n1", "n2"): LinkMeasurement("", 1e-4, 2e9), ("n2", "n1"): LinkMeasurement("", 1e-4, 1.5e9)}
    trips = {
        ("n1", "n2"): {"a": LinkMeasurement("", 3e-4), "b": LinkMeasurement("", 2e-4), "c": LinkMeasurement("closed")},
        ("n2", "n1"): {"d": LinkMeasurement("", 1e-4)},
    }
    assert worst_link_values(survey(measured_links=links, links_by_address=trips)) == (1.5e9, 2e-4)


def test_the_address_that_the_hosts_name_means_is_preferred() -> None:
    second = (Address("eth0", "10.77.0.2", 24), Address("ib0", "10.88.0.2", 24))
    changed = survey(facts={"n2": {"addresses": second, "own_addresses": ("10.88.0.2",)}})
    assert [usable.interface for host in hosts_in_survey(changed) if (usable := host.usable_address())] == [
        "eth0",
        "ib0",
        "eth0",
    ]
    closed = dict(changed.links_by_address) | {
        ("n1", "n2"): {"10.77.0.2": LinkMeasurement(), "10.88.0.2": LinkMeasurement("refused")}
    }
    changed = survey(facts={"n2": {"addresses": second, "own_addresses": ("10.88.0.2",)}}, links_by_address=closed)
    assert [usable.interface for host in hosts_in_survey(changed) if (usable := host.usable_address())] == ["eth0"] * 3


def test_of_hosts_that_differ_without_a_majority_all_are_named() -> None:
    hosts = {"n1": facts("n1"), "n2": facts("n2", python="3.12.0")}
    findings = compare_hosts(hosts, dict.fromkeys(hosts, 1), 0)
    assert [(finding.severity, finding.host) for finding in findings] == [("error", "n1, n2")]
    assert "3.11.7 on n1, 3.12.0 on n2" in findings[0].what
