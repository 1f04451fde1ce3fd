"""A healthy set of three hosts as facts and a survey, for tests to spoil in one point."""

from itertools import permutations
from typing import Any

import msgspec

from paceline.host.facts import Address, NodeFacts, ResourceLimit
from paceline.host.gpus import Gpu
from paceline.lab.doctor.host import FactsAnswer, FolderProbeAnswer, LinkMeasurement
from paceline.lab.doctor.survey import PlannedRun, Survey

HOSTS = ("n1", "n2", "n3")


def facts(name: str, /, **changes: Any) -> NodeFacts:
    """One host as it should be, but for `changes`."""
    address = f"10.77.0.{name.removeprefix('n')}"
    healthy = NodeFacts(
        host=name, pid=1000, python="3.11.7", executable="/usr/bin/python", platform="Linux x86_64",
        packages={"paceline": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"}, source="aaaaaaaaaaaa", cwd="/home/me",
        addresses=(Address("eth0", address, 24),), down=(), own_addresses=(address,), cores=8, memory=1 << 34,
        shm_size=1 << 33, shm_free=1 << 33, nofile=ResourceLimit(1024, 1 << 20), memlock=ResourceLimit(-1, -1), gpus=(),
        wall_seconds=0.0, monotonic_seconds=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(healthy, **changes)


def gpu(index: int, **changes: Any) -> Gpu:
    """One GPU that is whole and free."""
    whole = Gpu(
        index=index, name="A100", driver="550.54", memory=80 << 30, memory_used=500 << 20, links=("-", "nvlink")
    )
    return msgspec.structs.replace(whole, **changes)


def survey(**changes: Any) -> Survey:
    """Three healthy hosts, except for `changes`; facts and disks change by host: facts={"n2": {...}}."""
    spoiled: dict[str, dict[str, Any]] = changes.pop("facts", {})
    disks: dict[str, int] = changes.pop("free", {})
    planned: dict[str, Any] = {"hosts": HOSTS, "workers": (2, 2, 2), "run_dir": "/shared/run"}
    hosts = {
        host: FactsAnswer(facts(host, **spoiled.get(host, {})), 40000, "/shared", disks.get(host, 1 << 40), 1 << 41)
        for host in HOSTS
    }
    pairs = list(permutations(HOSTS, 2))
    content: dict[str, Any] = {
        "planned": PlannedRun(**planned | changes.pop("planned", {})),
        "lost": {},
        "hosts": hosts,
        "clock_offsets": {"n1": 0.001, "n2": -0.001, "n3": 0.0},
        "links_by_address": {
            (a, b): {one.address: LinkMeasurement("", 1e-4) for one in hosts[b].facts.addresses} for a, b in pairs
        },
        "folder_access": {host: FolderProbeAnswer() for host in HOSTS},
        "measured_links": {
            pair: LinkMeasurement("", 1e-4, 1.2e9) for pair in (("n1", "n2"), ("n2", "n3"), ("n3", "n1"))
        },
        "seconds": 1.0,
    }
    return Survey(**content | changes)
